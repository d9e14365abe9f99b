"""The engine on a GPU: the same text as on the CPU, and out of memory that is survived."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.parity import ours, reference
from tests.unit.workers.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model
from workers.backends.torch_backend import TorchBackend
from workers.errors import DeviceOutOfMemory
from workers.loading.files import resolve_model
from workers.setup import EngineOptions, size_engine

pytestmark = pytest.mark.gpu


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(5, 120))] for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_greedy_float32_equals_transformers_on_the_cpu(family, policy, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    rows = prompts(40)
    backend = TorchBackend.load(resolve_model(str(folder)), device="cuda", dtype="float32")
    got, _ = ours(backend, rows, 16, policy=policy, max_seqs=16, num_blocks=400)
    assert got == reference(folder, rows, 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_ends(dtype, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    backend = TorchBackend.load(resolve_model(str(folder)), device="cuda", dtype=dtype)
    rows = prompts(64)
    got, num_suspended = ours(backend, rows, 32, policy="exclusive", max_seqs=64, num_blocks=60)
    assert len(got) == 64
    assert num_suspended > 0


def test_auto_takes_the_gpu_and_its_memory(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3", tmp_path)
    backend = TorchBackend.load(resolve_model(str(folder)))
    assert backend.info.device.startswith("cuda")
    setup = size_engine(backend.info, EngineOptions())
    free_bytes, _ = torch.cuda.mem_get_info()
    assert setup.memory.kv_bytes < free_bytes


def test_more_kv_memory_than_there_is_says_so(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    backend = TorchBackend.load(resolve_model(str(folder)), device="cuda", dtype="float32")
    with pytest.raises(DeviceOutOfMemory, match="KV"):
        backend.allocate(num_blocks=1 << 31, block_size=16)


def test_memory_comes_back_when_a_backend_is_closed(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    before, _ = torch.cuda.mem_get_info()
    for _ in range(3):
        backend = TorchBackend.load(resolve_model(str(folder)), device="cuda")
        backend.allocate(num_blocks=20_000, block_size=16)
        backend.close()
        del backend
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 64 << 20
