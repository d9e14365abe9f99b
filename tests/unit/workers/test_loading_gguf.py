"""GGUF files: converted exactly and once, refused quickly when damaged."""

from __future__ import annotations

import json
import multiprocessing
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.unit.workers.loading_models import byte_tokenizer, gguf_weights, write_folder, write_gguf
from workers.errors import ModelError
from workers.loading import cache
from workers.loading.files import resolve_model
from workers.loading.gguf_file import read_gguf
from workers.loading.gguf_tokenizer import write_tokenizer
from workers.loading.tokenizer import Tokenizer

pytest.importorskip("gguf")


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_weights())


def test_float32_weights_come_through_unchanged(gguf_path: Path, tmp_path: Path) -> None:
    files = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    found = load_file(files.folder / "model.safetensors")
    want = gguf_weights()
    assert found.keys() == want.keys()
    assert all(np.array_equal(found[name], want[name]) for name in want)


def test_the_shape_of_the_model_comes_through(gguf_path: Path, tmp_path: Path) -> None:
    files = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    want = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: files.config[key] for key in want} == want
    assert files.eos_token_ids == {2}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_weights_equal_the_reference(tmp_path: Path, kind: str) -> None:
    import gguf
    from gguf.quants import dequantize, quantize

    number = gguf.GGMLQuantizationType[kind]
    weights = {"token_embd.weight": gguf_weights()["model.embed_tokens.weight"]}
    stored = quantize(weights["token_embd.weight"], number)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.tensors["token_embd.weight"].shape == (272, 32)
    assert np.array_equal(
        dequantize(file.raw("token_embd.weight"), number), dequantize(stored, number)
    )


def test_the_tokenizer_comes_through(gguf_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(resolve_model(str(gguf_path), cache_dir=tmp_path / "cache"))
    text = "hello world 2024 caf\u00e9"
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(["hello"], add_special_tokens=False) == [
        byte_tokenizer().encode("hello").ids
    ]
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).endswith("assistant\n")


def test_smollm_cuts_numbers_into_digits(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_weights(), pre="smollm")
    files = resolve_model(str(path), cache_dir=tmp_path / "cache")
    rules = json.loads((files.folder / "tokenizer.json").read_text())["pre_tokenizer"]
    assert {"type": "Digits", "individual_digits": True} in rules["pretokenizers"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_other_known_tokenizers_round_trip(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_weights(), pre=pre)
    tokenizer = Tokenizer.load(resolve_model(str(path), cache_dir=tmp_path / "cache"))
    text = "hello world, it's 12345\n\n  end"
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert tokenizer.decode(ids) == text


SPM_TOKENS = (
    *("<unk>", "<s>", "</s>"), *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "\u2581hello", "lo",
)  # fmt: skip


def spm_tokenizer(folder: Path, **changes: object) -> Tokenizer:
    """A SentencePiece tokenizer as in GGUF files: longer tokens score better, `lo` best."""
    types = [2, 3, 3, *[6] * 256, *[1] * (len(SPM_TOKENS) - 259)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(SPM_TOKENS),
        "tokenizer.ggml.scores": [
            0.0 if token == "lo" else -1.0 / len(token) for token in SPM_TOKENS
        ],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }
    write_folder(folder)
    write_tokenizer(metadata, folder, where="spm")
    return Tokenizer.load(resolve_model(str(folder)))


def test_a_sentencepiece_tokenizer_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    (ids,) = tokenizer.encode_batch(["hello w\u00e9"], add_special_tokens=True)
    tokens = ["<s>", "\u2581", "he", "l", "lo", "\u2581", "w", "<0xC3>", "<0xA9>"]
    assert [SPM_TOKENS[index] for index in ids] == tokens
    assert tokenizer.decode(ids) == "hello w\u00e9"


def test_a_sentencepiece_tokenizer_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scores"):
        spm_tokenizer(tmp_path, **{"tokenizer.ggml.scores": [0.0]})


def test_an_unknown_tokenizer_rule_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_weights(), pre="next-years")
    with pytest.raises(ModelError, match="next-years"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_scaled_rotary_positions_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_weights(), llama__rope__scaling__type="yarn")
    with pytest.raises(ModelError, match="rotary"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_a_file_without_all_its_layers_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_weights(layers=1))
    with pytest.raises(ModelError, match="2 layers"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_a_conversion_is_cached_and_found_by_content(gguf_path: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    stamp = (first.folder / "model.safetensors").stat().st_mtime_ns
    moved = gguf_path.rename(tmp_path / "renamed.gguf")
    second = resolve_model(str(moved), cache_dir=tmp_path / "cache")
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint
    assert (second.folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_killed_conversion_leaves_nothing_half_done(gguf_path: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path / "a")
    unfinished = tmp_path / "b" / "gguf" / f"{first.folder.name}.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    second = resolve_model(str(gguf_path), cache_dir=tmp_path / "b")
    assert not unfinished.exists()
    assert load_file(second.folder / "model.safetensors").keys() == gguf_weights().keys()


def test_a_failed_conversion_can_be_tried_again(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, f"No space left on device for {path.name}")

    with monkeypatch.context() as patch:
        patch.setattr("workers.loading.gguf_convert.convert", full_disk)
        with pytest.raises(ModelError, match="HEADRACE_CACHE"):
            resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]
    assert resolve_model(str(gguf_path), cache_dir=tmp_path / "cache").eos_token_ids == {2}


def test_a_damaged_cache_says_what_to_delete(gguf_path: Path, tmp_path: Path) -> None:
    files = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    weights = files.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelError, match="delete that folder"):
        resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")


def _convert_in_child(path: str, cache_dir: str, start: object, log: str) -> None:
    from workers.loading import gguf_convert

    convert = gguf_convert.convert

    def counted(source: Path, folder: Path) -> None:
        with Path(log).open("a") as file:
            file.write("converted\n")
        convert(source, folder)

    gguf_convert.convert = counted
    start.wait()  # type: ignore[attr-defined]
    resolve_model(path, cache_dir=Path(cache_dir))


def test_c58_processes_that_start_together_convert_once(gguf_path: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    log = tmp_path / "log"
    arguments = (str(gguf_path), str(tmp_path / "cache"), barrier, str(log))
    children = [context.Process(target=_convert_in_child, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert log.read_text() == "converted\n"


def start(version: int = 3, tensors: int = 0, pairs: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "short": (b"GGUF", "no GGUF file"),
    "other format": (start(magic=b"PK\3\4"), "no GGUF file"),
    "version 1": (start(version=1), "version 1"),
    "big-endian": (start(version=3 << 24), "version"),
    "countless tensors": (start(tensors=2**63), "tensors"),
    "countless pairs": (start(pairs=2**63), "pairs"),
    "endless key": (start(pairs=1) + text(b"k" * 20, 2**62), "are left"),
    "endless string": (start(pairs=1) + text(b"k") + struct.pack("<IQ", 8, 2**62), "are left"),
    "endless list": (start(pairs=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**61), "are left"),
    "endless strings": (start(pairs=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**61), "strings"),
    "list of lists": (start(pairs=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "items of type"),
    "unknown type": (start(pairs=1) + text(b"k") + struct.pack("<II", 99, 0), "unknown metadata"),
    "no UTF-8": (start(pairs=1) + text(b"\xff\xfe") + struct.pack("<II", 4, 0), "UTF-8"),
    "same key twice": (start(pairs=2) + (text(b"k") + struct.pack("<II", 4, 0)) * 2, "twice"),
    "zero alignment": (
        start(pairs=1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
        "alignment",
    ),
    "no dimensions": (start(tensors=1) + tensor(b"t", ()) + bytes(16), "dimensions"),
    "many dimensions": (start(tensors=1) + tensor(b"t", (1,) * 9) + bytes(64), "dimensions"),
    "empty tensor": (start(tensors=1) + tensor(b"t", (0,)) + bytes(64), "shape"),
    "huge tensor": (start(tensors=1) + tensor(b"t", (2**62, 2**62)) + bytes(64), "truncated"),
    "far away": (start(tensors=1) + tensor(b"t", (4,), offset=2**62) + bytes(64), "truncated"),
    "half a block": (start(tensors=1) + tensor(b"t", (33,), kind=2) + bytes(64), "shape"),
    "unknown tensor type": (start(tensors=1) + tensor(b"t", (32,), kind=77) + bytes(64), "type 77"),
    "same tensor twice": (start(tensors=2) + tensor(b"t", (1,)) * 2 + bytes(64), "twice"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_gguf_files_are_refused(tmp_path: Path, kind: str) -> None:
    data, message = HOSTILE[kind]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_a_model_error_or_stays_inside_the_file(
    gguf_path: Path, data: st.DataObject
) -> None:
    whole = gguf_path.read_bytes()
    keep = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    damaged = bytearray(whole[:keep])
    for _ in range(data.draw(st.integers(0, 6)) if keep else 0):
        damaged[data.draw(st.integers(0, min(keep, 14_000) - 1))] = data.draw(st.integers(0, 255))
    path = gguf_path.with_name("damaged.gguf")
    path.write_bytes(damaged)
    target = path.with_suffix(".out")
    target.mkdir(exist_ok=True)
    try:
        from workers.loading.gguf_convert import convert

        convert(path, target)
    except ModelError:
        return
    assert all(item.end <= keep for item in read_gguf(path).tensors.values())


def test_a_new_converter_uses_a_new_folder(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path)
    monkeypatch.setattr(cache, "CONVERTER_VERSION", cache.CONVERTER_VERSION + 1)
    assert resolve_model(str(gguf_path), cache_dir=tmp_path).folder != first.folder
