"""The torch backend: what it refuses, what it reports, how it fails and how it goes away."""

from __future__ import annotations

import gc
import json
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from schedulers.policies import make_policy
from schedulers.view import Budget, SeqId
from tests.unit.workers.tiny_models import make_tiny_model
from workers.backends.base import Batch, Segment
from workers.backends.torch_backend import TorchBackend
from workers.engine import Engine, EngineConfig
from workers.errors import BackendError, DeviceOutOfMemory, InternalError, ModelError
from workers.loading.files import resolve_model
from workers.models import device as device_choice
from workers.models.decoder import activation_bytes_per_token
from workers.models.device import pick_device, pick_dtype
from workers.request import Request, RequestId, SamplingParams
from workers.sequence import Sequence


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def backend(folder):
    made = TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype="float32")
    yield made
    made.close()


def sequence(seq_id: int, token_ids: list[int], **sampling) -> Sequence:
    seq = Sequence(
        SeqId(seq_id),
        Request(
            request_id=RequestId(str(seq_id)),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(**sampling),
        ),
        sample_index=0,
        max_model_len=512,
        eos_token_ids=frozenset({2}),
        find_stop=None,
        arrived_s=0.0,
    )
    seq.coroutine.close()
    return seq


def prompt_batch(*lengths: int) -> Batch:
    """First chunks of new sequences over 16-position blocks in order."""
    segments, block = [], 0
    for index, length in enumerate(lengths):
        num_blocks = -(-length // 16)
        table = list(range(block, block + num_blocks))
        block += num_blocks
        seq = sequence(index, [3 + at % 300 for at in range(index, index + length)])
        segments.append(Segment(seq, 0, length, table, True))
    return Batch(tuple(sorted(segments, key=lambda segment: segment.num_tokens == 1)))


# -- loading --------------------------------------------------------------------------------------


def changed_weights(folder: Path, target: Path, change) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weigh"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.self_attn.k_proj.weight"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(5)


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"has tensor 'model\.layers\.1\.mlp\.up_proj\.weigh', which this architecture"),
        (drop, r"lack tensor 'model\.layers\.2\.self_attn\.k_proj\.weight' \(1 are missing of"),
        (reshape, r"'model\.norm\.weight' has shape \[5\], and config\.json asks for \[144\]"),
        (quantise, r"'model\.layers\.0\.mlp\.down_proj\.weight' is of type I8"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, folder, tmp_path) -> None:
    files = resolve_model(str(changed_weights(folder, tmp_path, change)))
    with pytest.raises(ModelError, match=message):
        TorchBackend.load(files, device="cpu", dtype="float32")


def test_a_hostile_size_is_refused_before_memory_is_taken(folder, tmp_path) -> None:
    changed_weights(folder, tmp_path, len)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = 1 << 44
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has shape"):
        TorchBackend.load(resolve_model(str(tmp_path)), device="cpu", dtype="float32")


def test_a_tied_head_in_the_files_and_old_rotary_tables_are_ignored(tmp_path) -> None:
    make_tiny_model("llama-plain", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    backend = TorchBackend.load(resolve_model(str(tmp_path)), device="cpu", dtype="float32")
    assert backend.info.num_parameters == sum(t.numel() for t in tensors.values()) - 8 - 320 * 144


# -- device and number format ---------------------------------------------------------------------


def test_float16_is_refused_on_the_cpu_by_name() -> None:
    with pytest.raises(ModelError, match="float16 is not supported on the CPU"):
        pick_dtype("float16", torch.device("cpu"))


@pytest.mark.parametrize(("fast", "want"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_only_where_it_is_fast(fast, want, monkeypatch) -> None:
    capabilities = {"avx512_bf16": fast, "amx_bf16": False, "avx512_f": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert device_choice.cpu_has_fast_bfloat16() == fast
    assert pick_dtype("auto", torch.device("cpu")) == want


def test_a_device_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ModelError, match="'cuda' is not available; there is cpu"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


# -- what it reports ------------------------------------------------------------------------------


def test_info_counts_what_is_there(backend, folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    info = backend.info
    assert info.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert info.weights_bytes == 4 * info.num_parameters
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert (info.dtype, info.device, info.max_model_len) == ("float32", "cpu", 512)
    assert info.eos_token_ids == {2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_scratch_memory_is_bounded_by_the_estimate(dtype, deterministic, folder) -> None:
    backend = TorchBackend.load(
        resolve_model(str(folder)), device="cpu", dtype=dtype, deterministic=deterministic
    )
    backend.allocate(num_blocks=64, block_size=16)
    info = backend.info
    batch = prompt_batch(400, 250, 100, *[1] * 12)
    backend.execute(prompt_batch(4))
    peak = peak_bytes(lambda: backend.execute(batch))
    per_token = batch.num_tokens * info.activation_bytes_per_token
    assert peak <= per_token + len(batch.segments) * info.logits_bytes_per_seq
    assert peak >= per_token / 8, "the estimate is far too high"


def peak_bytes(work) -> int:
    """Most bytes of tensors alive at once that `work` made."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_the_activation_estimate_grows_with_every_size(backend) -> None:
    config = backend._model.config
    assert activation_bytes_per_token(config, 4) > activation_bytes_per_token(config, 2)
    assert activation_bytes_per_token(config, 4) >= 4 * 5 * config.intermediate_size


# -- life and failure -----------------------------------------------------------------------------


def test_order_of_calls_is_checked(folder) -> None:
    backend = TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype="float32")
    with pytest.raises(InternalError, match="before allocate"):
        backend.execute(prompt_batch(4))
    backend.allocate(num_blocks=4, block_size=16)
    assert len(backend.execute(prompt_batch(4, 1)).sampled) == 2
    backend.close()
    with pytest.raises(InternalError, match="closed"):
        backend.execute(prompt_batch(4))


def test_too_much_kv_memory_is_an_out_of_memory(backend) -> None:
    with pytest.raises(DeviceOutOfMemory, match=r"reserving 1099511627776 KV blocks of 16"):
        backend.allocate(num_blocks=1 << 40, block_size=16)


def test_torchs_own_out_of_memory_is_ours_and_the_next_batch_runs(backend, monkeypatch) -> None:
    backend.allocate(num_blocks=8, block_size=16)
    want = backend.execute(prompt_batch(20, 7)).sampled
    with monkeypatch.context() as patch:
        patch.setattr(backend._model, "logits", lambda *_: torch.empty(1 << 46))
        with pytest.raises(DeviceOutOfMemory, match="a batch of 27 tokens"):
            backend.execute(prompt_batch(20, 7))
    assert backend.execute(prompt_batch(20, 7)).sampled == want


def test_other_failures_of_torch_end_the_run(backend, monkeypatch) -> None:
    backend.allocate(num_blocks=8, block_size=16)
    monkeypatch.setattr(backend._model, "logits", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(BackendError, match="torch failed in a batch of 5 tokens"):
        backend.execute(prompt_batch(5))


def test_not_a_number_stays_in_its_row(backend) -> None:
    """A row whose logits are not finite is an error; its neighbours, and the next user of its
    blocks, are not.
    """
    backend.allocate(num_blocks=8, block_size=16)
    batch = prompt_batch(20, 7)
    want = backend.execute(batch).sampled
    bad = sequence(9, [5] * 20)
    for layer in backend._pool.layers:
        layer.k_BKPH[4:6] = float("nan")
    bad_segment = Segment(bad, 19, 1, [4, 5], True)
    got = backend.execute(Batch((*batch.segments, bad_segment))).sampled
    assert got[:2] == want
    assert got[2].error is not None
    reused = batch.segments[0]._replace(block_table=[4, 5])
    assert backend.execute(Batch((reused,))).sampled == want[:1]
    next_one = Segment(reused.seq, 19, 1, [4, 5], True)
    assert backend.execute(Batch((next_one,))).sampled[0].token_id == want[0].token_id


def test_c37_two_models_in_sequence_and_memory_comes_back(folder, tmp_path) -> None:
    other = make_tiny_model("qwen3", tmp_path)
    answers = []
    for path in (folder, other, folder):
        backend = TorchBackend.load(resolve_model(str(path)), device="cpu", dtype="float32")
        backend.allocate(num_blocks=8, block_size=16)
        answers.append(backend.execute(prompt_batch(9, 4)).sampled)
        held = [
            weakref.ref(tensor)
            for tensor in (
                backend._model.embedding_VD,
                backend._model.layers[0].qkv.weight_OI,
                backend._pool.layers[0].k_BKPH,
                backend._model._logits_SV,
            )
        ]
        backend.close()
        gc.collect()
        assert [ref() for ref in held] == [None] * 4
    assert answers[0] == answers[2]


def test_allocating_again_gives_the_first_pool_back(backend) -> None:
    backend.allocate(num_blocks=8, block_size=16)
    first = weakref.ref(backend._pool)
    backend.allocate(num_blocks=4, block_size=16)
    assert first() is None


# -- in the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def generated(folder) -> dict[int, list[int]]:
    """Greedy continuations by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = {}
    for index, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        answers[index] = out[0, len(prompt) :].tolist()
    return answers


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, 320, (length,), generator=rng).tolist()
        for length in (5, 40, 17, 80, 1, 33, 64)
    ]


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("num_blocks", [60, 15])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_engine_generates_what_transformers_does(
    policy, num_blocks, deterministic, folder, generated
) -> None:
    """With all in KV memory at once, and with so little of it that sequences are suspended."""
    backend = TorchBackend.load(
        resolve_model(str(folder)), device="cpu", dtype="float32", deterministic=deterministic
    )
    budget = Budget(
        max_batch_tokens=48,
        max_seqs=6,
        reservation="full" if deterministic else "expected",
        chunk_tokens=16 if deterministic else None,
    )
    config = EngineConfig(num_blocks=num_blocks, block_size=8, budget=budget)
    engine = Engine(backend, make_policy(policy), config, clock=time.perf_counter)
    sampling = SamplingParams(max_tokens=24)
    requests = (
        Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling)
        for index, prompt in enumerate(prompts())
    )
    results = list(engine.run(requests))
    suspended = sum(item.num_suspensions for item in results)
    assert bool(suspended) == (num_blocks == 15 and not deterministic)
    got = {int(item.request_id): list(item.completions[0].token_ids) for item in results}
    assert got == generated
