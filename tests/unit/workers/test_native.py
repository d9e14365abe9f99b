"""The native decoder: the same numbers whatever the batch, and what it does with odd input."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.unit.workers.test_models_logits import NUM_BLOCKS, make_rows, poison, run
from tests.unit.workers.tiny_models import make_tiny_model
from workers import kernels
from workers.backends.torch_backend import TorchBackend
from workers.errors import ModelError
from workers.kernels import decoder as kernel
from workers.loading.files import resolve_model
from workers.models.decoder import DecoderModel
from workers.models.native import NativeDecoder
from workers.models.step import lay_out

pytestmark = pytest.mark.skipif(
    not kernel.is_available(), reason="no AVX-512 with BF16 and VNNI, or no compiler"
)
DTYPES = ("bfloat16", "int8")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    made: dict[tuple[str, str], TorchBackend] = {}

    def backend(family: str, dtype: str) -> TorchBackend:
        if (family, dtype) not in made:
            # A vocabulary that fills no whole panel, and heads that fill no whole run of 64.
            folder = make_tiny_model(
                family, tmp_path_factory.mktemp("native"), vocab_size=331, head_dim=48
            )
            made[family, dtype] = load_from(folder, dtype)
        return made[family, dtype]

    return backend


def load_from(folder: Path, dtype: str) -> TorchBackend:
    backend = TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype=dtype)
    backend.allocate(num_blocks=NUM_BLOCKS, block_size=16)
    poison(backend)
    return backend


def test_the_native_decoder_is_taken(load) -> None:
    assert isinstance(load("llama", "bfloat16")._model, NativeDecoder)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "qwen3"])
def test_results_depend_neither_on_the_batch_nor_on_the_chunks(family, dtype, load) -> None:
    """Bit by bit: in one chunk, in several, token by token, in company, over other blocks."""
    backend = load(family, dtype)
    lengths = (90, 23, 64, 130, 41)
    want = [run(backend, row.segment(0, len(row.token_ids)))[0] for row in make_rows(*lengths)]
    for seed, cuts in enumerate(((0, 7, 20, 64, 65), (0, 1, 2, 3, 40), (0, 63), (0, 16, 33))):
        rows = make_rows(*lengths)
        for row, moved in zip(rows, make_rows(*lengths, seed=seed + 1), strict=True):
            row.block_table = moved.block_table
        for begin, end in itertools.pairwise(cuts):
            segments = [
                row.segment(begin, min(end, length) - begin)
                for row, length in zip(rows, lengths, strict=True)
                if length > begin
            ]
            run(backend, *sorted(segments, key=lambda segment: segment.num_tokens == 1))
        left = [(row, n, min(cuts[-1], n - 1)) for row, n in zip(rows, lengths, strict=True)]
        left.sort(key=lambda item: item[1] - item[2] == 1)
        got = run(backend, *(row.segment(done, n - done) for row, n, done in left))
        for (row, _, _), logits in zip(left, got, strict=True):
            index = next(i for i, item in enumerate(rows) if item is row)
            assert torch.equal(logits, want[index])


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_rows_over_shared_blocks_are_computed_as_if_alone(family, load) -> None:
    """Single tokens behind prefixes that they share to different depths, some down to nothing."""
    backend = load(family, "bfloat16")
    shared = (128, 128, 112, 96, 64, 64, 48, 16, 0, 64, 64, 80, 64)
    lengths = list(range(130, 143))
    rows = make_rows(*lengths)
    first, *others = rows
    for row, num_shared in zip(others, shared[1:], strict=True):
        row.token_ids[:num_shared] = first.token_ids[:num_shared]
        row.block_table[: num_shared // 16] = first.block_table[: num_shared // 16]
    for row, length in zip(rows, lengths, strict=True):
        run(backend, row.segment(0, length - 1))
    last = [row.segment(length - 1, 1) for row, length in zip(rows, lengths, strict=True)]
    alone = torch.cat([run(backend, segment) for segment in last])
    for order in (range(13), range(12, -1, -1)):
        assert torch.equal(run(backend, *(last[i] for i in order)), alone[list(order)])


def test_neighbours_that_share_a_pair_of_values_are_written_by_one_thread(load) -> None:
    """Wherever the threads part a chunk: again and again, as a race is not always lost."""
    backend = load("llama", "bfloat16")
    for length in range(3, 40):
        (row,) = make_rows(length, seed=length)
        want = run(backend, row.segment(0, length))
        for start in (1, 2):
            run(backend, row.segment(0, start))
            for _ in range(4):
                assert torch.equal(run(backend, row.segment(start, length - start)), want)


@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen3"])
def test_int8_is_close_to_float32(family, load, tmp_path) -> None:
    (row,) = make_rows(50)
    exact = load_from(make_tiny_model(family, tmp_path, vocab_size=331, head_dim=48), "float32")
    want = run(exact, row.segment(0, 50))
    got = run(load(family, "int8"), row.segment(0, 50))
    assert (got - want).abs().max() < 0.1 * (want.max() - want.min())
    assert torch.corrcoef(torch.cat([got, want]))[0, 1] > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 30])
def test_the_likeliest_token_is_that_of_the_logits(dtype, num_rows, load) -> None:
    backend = load("llama", dtype)
    rows = make_rows(*[9] * num_rows)
    layout = lay_out_all(rows)
    logits = backend._model.logits(layout, backend._pool)
    ids, best = logits.likeliest()
    dense = logits.rows(torch.arange(num_rows))
    assert torch.equal(ids, dense.argmax(1))
    assert torch.equal(best, dense.max(1).values)


def lay_out_all(rows):
    from workers.backends.base import Batch

    return lay_out(Batch(tuple(row.segment(0, len(row.token_ids)) for row in rows)), 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_is_noticed_and_harms_no_other(dtype, load, tmp_path) -> None:
    """The embedding of one token is NaN: its sequence alone has NaN logits."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model("llama", tmp_path, vocab_size=331, head_dim=48)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][330] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    backend = load_from(folder, dtype)
    rows = make_rows(20, 33, 17)
    clean = run(backend, *(row.segment(0, len(row.token_ids)) for row in rows))
    rows[1].token_ids[5] = 330
    logits = backend._model.logits(lay_out_all(rows), backend._pool)
    _ids, best = logits.likeliest()
    assert best.isnan().tolist() == [False, True, False]
    dense = logits.rows(torch.arange(3))
    assert dense[1].isnan().all()
    assert torch.equal(dense[[0, 2]], clean[[0, 2]])
    # The blocks of the broken row serve another one: nothing of it is left.
    fresh = make_rows(20, 33, 17)
    for row, old in zip(fresh, (rows[1], rows[0], rows[2]), strict=True):
        row.block_table = [*old.block_table, 60, 61]
    got = run(backend, *(row.segment(0, len(row.token_ids)) for row in fresh))
    assert torch.equal(got[0], clean[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_give_the_first_id(dtype, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][:] = tensors["lm_head.weight"][0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    backend = load_from(folder, dtype)
    rows = make_rows(5, 6, 7, 8, 9, 10, 11, 12)
    ids, _ = backend._model.logits(lay_out_all(rows), backend._pool).likeliest()
    assert ids.tolist() == [0] * 8


def test_sizes_that_the_kernel_does_not_take_run_in_torch(tmp_path) -> None:
    folder = make_tiny_model("llama", tmp_path, hidden_size=72)
    backend = load_from(folder, "bfloat16")
    assert isinstance(backend._model, DecoderModel)
    with pytest.raises(ModelError, match="multiples of 16; use bfloat16 or float32"):
        load_from(folder, "int8")


def test_without_a_compiler_torch_runs_bfloat16_and_int8_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "off")
    kernels.load.cache_clear()
    try:
        folder = make_tiny_model("llama", tmp_path)
        assert isinstance(load_from(folder, "bfloat16")._model, DecoderModel)
        with pytest.raises(ModelError, match="int8 needs a processor with AVX-512"):
            load_from(folder, "int8")
    finally:
        monkeypatch.undo()
        kernels.load.cache_clear()


def test_int8_is_refused_on_a_gpu() -> None:
    from workers.models.device import pick_dtype

    with pytest.raises(ModelError, match="int8 is for CPUs, not for cuda"):
        pick_dtype("int8", torch.device("cuda"))
