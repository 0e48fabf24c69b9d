import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo.download.store import ModelStore, default_sources
from exo.errors import InvalidRequest, ModelUnsupported
from exo.models.tokenizer import ByteTokenizer, HFTokenizer, TextStream, load_tokenizer


@pytest.fixture(scope="module")
def smollm(exo_home: Path) -> HFTokenizer:
    models = exo_home / "models"
    store = ModelStore(models, default_sources(models))
    return HFTokenizer(asyncio.run(store.ensure("smollm2-135m", lambda progress: None)))


def streamed(tokenizer, token_ids: list[int]) -> list[str]:  # type: ignore[no-untyped-def]
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in token_ids), stream.finish()]


@given(st.text(max_size=40))
def test_bytes_stream_as_the_text_they_are(text: str) -> None:
    pieces = streamed(ByteTokenizer(), list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    assert streamed(ByteTokenizer(), list("a日".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_real_tokens_stream_as_they_decode(smollm: HFTokenizer) -> None:
    for text in ("Hello  world,\n\n it's 2024!", "日本語とemoji 👩‍👩‍👧 mixed", "  leading"):
        ids = smollm._tokenizer.encode(text, add_special_tokens=False)
        assert "".join(streamed(smollm, ids)) == smollm.decode(ids) == text


def test_the_chat_template_is_the_models_own(smollm: HFTokenizer) -> None:
    ids = smollm.encode_chat([{"role": "user", "content": "Hi 42"}])
    shown = smollm._tokenizer.decode(ids)
    assert shown.endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
    # Digits are split one by one, special tokens are one token each.
    assert len(smollm._tokenizer.encode("2024", add_special_tokens=False)) == 4
    assert ids.count(1) == 3
    assert smollm.eos_token_ids == {2}


def test_a_model_without_tokenizer_or_template_says_so(smollm: HFTokenizer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        load_tokenizer("llama", tmp_path)
    smollm._tokenizer.save_pretrained(tmp_path)
    for template in tmp_path.glob("*.jinja"):
        template.unlink()
    bare = HFTokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.encode_chat([{"role": "user", "content": "x"}])
