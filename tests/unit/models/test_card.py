from pathlib import Path

import pytest

from exo.errors import ModelNotFound
from exo.models.card import default_model, registry, resolve


def test_every_registered_model_resolves() -> None:
    assert default_model() in registry()
    for model_id, card in registry().items():
        assert resolve(model_id) is card
        assert card.repo and card.name
        assert card.context >= 4096 and card.licence, card
        assert set(card.kinds) <= {"chat", "code", "reasoning", "vision"} and "chat" in card.kinds
        assert card.expert_bytes < card.size_bytes
        # What a weight takes in 4 bits, with its scales, and in what is larger.
        if sizes := card.quantizations():
            assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
            assert 0.8 < sizes["Q4_K_M"] / card.size_bytes < 1.4 or "4 bit" not in card.name, card
    wheel = registry()[default_model()].wheel
    assert wheel is not None and len(wheel.sha256) == 64


def test_a_repo_a_directory_and_a_file_are_models_too(tmp_path: Path) -> None:
    assert resolve("org/some-model").repo == "org/some-model"
    assert resolve("org/some-model@abc123").repo == "org/some-model@abc123"
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).path == tmp_path
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)).path == file


@pytest.mark.parametrize("model_id", ["", "nope", "/no/such/dir", "../x", "a/b/c", "x.gguf"])
def test_anything_else_is_unknown(model_id: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(model_id)
    assert refused.value.param == "model"


def test_a_slip_of_the_pen_gets_a_hint() -> None:
    with pytest.raises(ModelNotFound, match="did you mean smollm2-135m"):
        resolve("smollm2-135")


@pytest.mark.parametrize("text", ["~nobody-of-this-name", "x" * 5000, "a\0b", "~\x0f/x", ""])
def test_what_is_no_path_is_no_model(text: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(text)
