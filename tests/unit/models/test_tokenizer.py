import asyncio
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

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
        ids = smollm.encode(text)
        assert "".join(streamed(smollm, ids)) == smollm.decode(ids) == text


def test_the_chat_template_is_the_models_own(smollm: HFTokenizer) -> None:
    ids = smollm.encode_chat([{"role": "user", "content": "Hi 42"}])
    shown = smollm._backend.decode(ids, skip_special_tokens=False)
    assert shown.endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
    # Digits are split one by one, special tokens are one token each.
    assert len(smollm.encode("2024")) == 4
    assert ids.count(1) == 3
    assert smollm.eos_token_ids == {2}


def test_a_model_without_tokenizer_or_template_says_so(smollm: HFTokenizer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        load_tokenizer("llama", tmp_path)
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    bare = HFTokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.encode_chat([{"role": "user", "content": "x"}])


def test_it_is_what_transformers_makes_of_it(checkpoint: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    ours = HFTokenizer(checkpoint)
    conversation = [
        {"role": "system", "content": "Be <b>brief</b> & “kind”."},
        {"role": "user", "content": "def f(x):\n    return x ** 2024  # 日本語 👩‍👩‍👧\n"},
        {"role": "assistant", "content": "<|im_end|> is a token"},
        {"role": "user", "content": ""},
    ]
    for some in (conversation[:2], conversation, conversation[1:2]):
        text = theirs.apply_chat_template(some, tokenize=False, add_generation_prompt=True)
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_chat(some) == ids
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def write(folder: Path, **files: object) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


WORDS = tokenizers.Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))


def test_templates_in_every_place_they_are_kept(tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "b"},
        {"name": "default", "template": "a"},
    ]
    file = {"chat_template__jinja": "{% generation %}b{% endgeneration %}"}
    places: list[tuple[dict[str, object], list[int]]] = [
        ({"tokenizer_config__json": {"chat_template": "a"}}, [1]),
        ({"tokenizer_config__json": {"chat_template": several}}, [1]),
        ({"chat_template__json": {"chat_template": "b"}}, [2]),
        ({"tokenizer_config__json": {"chat_template": "a"}} | file, [2]),
    ]
    for i, (files, ids) in enumerate(places):
        (folder := tmp_path / str(i)).mkdir()
        write(folder, tokenizer__json=WORDS.to_str(), **files)
        assert HFTokenizer(folder).encode_chat([]) == ids


def test_tokens_with_a_role_and_tokens_added_later(tmp_path: Path) -> None:
    added = {"3": {"content": "<end>", "special": True}, "4": {"content": "<think>"}}
    described = {
        "added_tokens_decoder": added,
        "eos_token": {"content": "<end>"},
        "chat_template": "{{ bos_token }}<think>{{ eos_token }}",
    }
    roles = {"bos_token": "a", "eos_token": "b"}
    files = {"tokenizer_config__json": described, "special_tokens_map__json": roles}
    ends = {"eos_token_id": [3, 7]}
    found = HFTokenizer(
        write(tmp_path, tokenizer__json=WORDS.to_str(), generation_config__json=ends, **files)
    )
    assert found.encode_chat([]) == [1, 4, 3]
    assert found.decode([1, 4, 3]) == "a <think>"
    assert found.eos_token_ids == {3, 5, 7}


def test_a_template_is_kept_in_its_sandbox_and_its_refusal_is_the_clients(tmp_path: Path) -> None:
    templates = {
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{{ messages.__class__.__mro__ }}": "unsafe",
        "{{ messages[0].content.nothing.more }}": "no attribute",
    }
    for i, (template, says) in enumerate(templates.items()):
        (folder := tmp_path / str(i)).mkdir()
        described = {"chat_template": template}
        write(folder, tokenizer__json=WORDS.to_str(), tokenizer_config__json=described)
        with pytest.raises(InvalidRequest, match=says):
            HFTokenizer(folder).encode_chat([{"role": "user", "content": "x"}])
    (folder := tmp_path / "broken").mkdir()
    write(folder, tokenizer__json=WORDS.to_str(), chat_template__jinja="{% if %}")
    with pytest.raises(ModelUnsupported, match="chat template is broken"):
        HFTokenizer(folder)
