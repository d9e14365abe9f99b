"""The native decode attention against a brute-force oracle, and what happens without a compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess

import pytest
import torch

from workers import kernels
from workers.kernels import attention, decoder, encoder
from workers.models.device import cpu_has


def oracle(q, k, v, tables, lengths, window):
    """One sequence and one head at a time, in float64."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    for seq in range(q.shape[0]):
        length = int(lengths[seq])
        begin = max(0, length - window) if window else 0
        for head in range(q.shape[1]):
            blocks = tables[seq].long()
            keys = k[blocks, head // groups].reshape(-1, q.shape[2])[begin:length].double()
            values = v[blocks, head // groups].reshape(-1, q.shape[2])[begin:length].double()
            scores = keys @ q[seq, head].double() / q.shape[2] ** 0.5
            out[seq, head] = (torch.softmax(scores, 0) @ values).to(q.dtype)
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (8, 2, 128, 16), (4, 4, 80, 8), (14, 2, 64, 32)])
@pytest.mark.parametrize("window", [0, 1, 13])
def test_decode_attention_equals_the_oracle(dtype, tolerance, shape, window) -> None:
    if kernels.load() is None:
        pytest.skip("no compiler on this machine")
    num_heads, num_kv_heads, head_size, block_size = shape
    rng = torch.Generator().manual_seed(num_heads * 100 + window)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=rng).to(dtype)

    k, v = (draw(40, num_kv_heads, block_size, head_size) for _ in range(2))
    q = draw(6, num_heads, head_size)
    tables = torch.stack([torch.randperm(40, generator=rng)[:5] for _ in range(6)]).int()
    lengths = torch.tensor(
        [1, 2, block_size, block_size + 1, 3 * block_size + 5, 5 * block_size]
    ).int()
    got = attention.decode_attention(q, k, v, tables, lengths, scale=head_size**-0.5, window=window)
    want = oracle(q, k, v, tables, lengths, window)
    assert (got.double() - want.double()).abs().max() < tolerance


def test_the_decoder_is_there_where_processor_and_compiler_are() -> None:
    """A source that does not compile would only be logged, and every test of it skipped."""
    features = ("avx512_bf16", "avx512_vnni")
    if shutil.which("g++") is None or not all(map(cpu_has, features)):
        pytest.skip("no compiler, or no AVX-512 with BF16 and VNNI")
    assert decoder.is_available()


def test_the_encoder_is_there_where_processor_and_compiler_are() -> None:
    if shutil.which("g++") is None or not cpu_has("avx512_vnni"):
        pytest.skip("no compiler, or no AVX-512 with VNNI")
    assert encoder.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["cascadelake", "haswell"])
def test_the_sources_suit_processors_without_bfloat16_and_without_all_of_it(processor) -> None:
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("no compiler")
    flags = [flag for flag in kernels.FLAGS if flag != "-march=native"]
    command = ["g++", *flags, f"-march={processor}", "-fsyntax-only", *map(str, kernels.SOURCES)]
    subprocess.run(command, check=True, timeout=100)


def test_not_a_number_is_passed_on() -> None:
    if kernels.load() is None:
        pytest.skip("no compiler on this machine")
    k = torch.randn(2, 1, 4, 16)
    q = torch.full((1, 1, 16), float("nan"))
    tables, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([6]).int()
    assert attention.decode_attention(q, k, k, tables, lengths, scale=1.0).isnan().all()


@pytest.fixture
def fresh_kernels():
    kernels.load.cache_clear()
    yield kernels
    kernels.load.cache_clear()


def test_it_can_be_switched_off(fresh_kernels, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "off")
    assert fresh_kernels.load() is None


def test_a_failing_compiler_is_reported_and_not_fatal(
    fresh_kernels,
    monkeypatch,
    tmp_path,
    caplog,
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\necho broken >&2; [ "$1" = --version ]\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    assert fresh_kernels.load() is None
    assert "broken" in caplog.text
    left = [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()]
    assert left == [".lock"]
