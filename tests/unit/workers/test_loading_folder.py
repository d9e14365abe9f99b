"""Hugging Face folders: whole ones open, damaged and hostile ones are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.workers.loading_models import CONFIG, write_folder, write_safetensors
from workers.errors import ModelError, UnsafeModelError
from workers.loading.files import resolve_model
from workers.loading.safetensors_file import read_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def sharded(folder: Path, weight_map: dict[str, object]) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_whole_folder_opens(folder: Path) -> None:
    files = resolve_model(str(folder))
    assert files.config["model_type"] == "llama"
    assert [path.name for path in files.weight_files] == ["model.safetensors"]
    assert files.generation_config == {}
    assert files.eos_token_ids == {2}


def test_generation_config_decides_what_ends_a_completion(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert resolve_model(str(folder)).eos_token_ids == {1, 2}


def test_a_copy_has_the_same_fingerprint_and_a_change_another(folder: Path, tmp_path: Path) -> None:
    first = resolve_model(str(folder)).fingerprint
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert resolve_model(str(copy)).fingerprint == first
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert resolve_model(str(copy)).fingerprint != first


def test_every_shard_of_an_index_is_found(folder: Path) -> None:
    sharded(folder, {"a": "x-2.safetensors", "b": "x-1.safetensors"})
    write_safetensors(folder / "x-2.safetensors", {"a": np.zeros(3, np.float32)})
    write_safetensors(folder / "x-1.safetensors", {"b": np.zeros(3, np.float32)})
    names = [path.name for path in resolve_model(str(folder)).weight_files]
    assert names == ["x-1.safetensors", "x-2.safetensors"]


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", 3, None]
)
def test_an_index_cannot_reach_outside_its_folder(folder: Path, shard: object) -> None:
    sharded(folder, {"a": shard})
    write_safetensors(folder.parent / "x.safetensors", {"a": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="same folder"):
        resolve_model(str(folder))


def test_an_index_cannot_name_pickled_shards(folder: Path) -> None:
    sharded(folder, {"a": "pytorch_model.bin"})
    with pytest.raises(ModelError, match="only safetensors"):
        resolve_model(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder, {"a": "gone.safetensors"})
    with pytest.raises(ModelError, match=r"gone.safetensors"):
        resolve_model(str(folder))


def test_a_shard_without_its_tensor_is_named(folder: Path) -> None:
    sharded(folder, {"a": "x.safetensors", "c": "x.safetensors"})
    write_safetensors(folder / "x.safetensors", {"a": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="lacks tensor 'c'"):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a": 1, "a": 2}', '{"a": ' * 100_000, "\ud800"], ids=range(6)
)
def test_broken_json_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_loaded(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsafeModelError, match="convert them to safetensors"):
        resolve_model(str(folder))


def test_remote_code_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Evil"], "auto_map": {"AutoModel": "evil.py--Evil"}}
    folder = write_folder(tmp_path / "model", config=config)
    with pytest.raises(UnsafeModelError, match="remote code"):
        resolve_model(str(folder))


def test_remote_code_of_an_architecture_of_ours_is_ignored(tmp_path: Path) -> None:
    config = CONFIG | {"auto_map": {"AutoModel": "evil.py--Evil"}}
    folder = write_folder(tmp_path / "model", config=config)
    assert resolve_model(str(folder)).config["model_type"] == "llama"


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config=CONFIG | {"quantization_config": {"bits": 4}})
    with pytest.raises(ModelError, match="quantization_config"):
        resolve_model(str(folder))


def test_no_weights_at_all_says_what_is_expected(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model.safetensors"):
        resolve_model(str(folder))


def header_file(path: Path, header: object, data: bytes) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE_HEADERS: dict[str, tuple[object, int]] = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "hole": ({"a": entry(0, 8), "b": entry(12, 20)}, 20),
    "beyond the end": ({"a": entry(0, 8)}, 4),
    "bytes left over": ({"a": entry(0, 8)}, 12),
    "size and shape differ": ({"a": entry(0, 12)}, 12),
    "end before begin": ({"a": entry(8, 0)}, 8),
    "negative shape": ({"a": entry(0, 8, (-1, -2))}, 8),
    "huge shape": ({"a": entry(0, 8, (2**62, 2**62))}, 8),
    "float shape": ({"a": entry(0, 8, (2.0,))}, 8),
    "true as a size": ({"a": entry(0, 4, (True,))}, 4),
    "unknown dtype": ({"a": entry(0, 8, (2,), "PICKLE")}, 8),
    "dtype of no string": ({"a": entry(0, 8, (2,), ["F32"])}, 8),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8),
    "entry of no object": ({"a": 3}, 0),
    "list for a header": ([1], 0),
    "no JSON": (b"nonsense", 0),
    "no UTF-8": (b'{"\xff": 1}', 0),
    "same tensor twice": (b'{"a": {}, "a": {}}', 0),
    "deep nesting": (b'{"a":' * 50_000, 0),
}


@pytest.mark.parametrize("kind", HOSTILE_HEADERS)
def test_hostile_safetensors_are_refused(tmp_path: Path, kind: str) -> None:
    header, size = HOSTILE_HEADERS[kind]
    path = header_file(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=r"model.safetensors"):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_lying_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="damaged"):
        read_header(path)


@pytest.mark.parametrize("data", [b"", b"\0", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        read_header(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_a_model_error_or_goes_unseen(folder: Path, data: st.DataObject) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    keep = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:keep])
    for _ in range(data.draw(st.integers(0, 4)) if keep else 0):
        damaged[data.draw(st.integers(0, keep - 1))] = data.draw(st.integers(0, 255))
    path = folder / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        found = read_header(path)
    except ModelError:
        return
    assert sum(item.end - item.begin for item in found.values()) < len(whole)
    assert keep == len(whole)


def test_the_header_reader_agrees_with_the_library(folder: Path) -> None:
    from safetensors import safe_open

    found = read_header(folder / "model.safetensors")
    with safe_open(str(folder / "model.safetensors"), framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: item.shape for name, item in found.items()} == shapes
