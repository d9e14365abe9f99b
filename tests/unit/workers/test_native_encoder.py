"""The native encoder: close to float32, and the same numbers whatever the batch."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
import torch

from tests.unit.workers.test_encoder_models import cosine_distance, make_texts, mean_states
from tests.unit.workers.tiny_encoders import VOCAB_SIZE, make_tiny_encoder
from workers import kernels
from workers.backends.torch_encoder import TorchEncoder
from workers.encoding import PackedTexts
from workers.kernels import encoder as kernel
from workers.loading.files import resolve_model
from workers.models.bert import BertConfig, BertModel, BertNames
from workers.models.device import cpu_has
from workers.models.native_encoder import NativeEncoder, supports

pytestmark = pytest.mark.skipif(
    not kernel.is_available() or cpu_has("amx_tile"),
    reason="no AVX-512 with VNNI, or no compiler, or matrix tiles, which are faster",
)
CPU = torch.device("cpu")
# Sizes that fill no whole panel of 64 outputs and no whole group of 384 inputs.
SIZES = {"hidden_size": 96, "intermediate_size": 928, "num_attention_heads": 3}
DISTIL_SIZES = {"dim": 96, "hidden_dim": 928, "n_heads": 3}
LENGTHS = (7, 60, 1, 23, 23, 2, 41, 7, 100, 16, 17, 33)


def make_model(seed: int = 0, **changes) -> BertModel:
    """A random model of our own; weights are such that all layers matter."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 416,
        "num_layers": 3,
        "num_heads": 2,
        "norm_eps": 1e-12,
        "activation": "gelu",
        "num_positions": 512,
        "num_types": 2,
        "padding_id": None,
        "names": BertNames(),
    }
    model = BertModel(BertConfig(**(sizes | changes)), dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for name, place in model.places().items():
        is_scale = "LayerNorm.weight" in name
        place.part.normal_(1.0 if is_scale else 0.0, 0.2, generator=generator)
    return model


def states(model: BertModel | NativeEncoder, texts: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states of each text."""
    packed = PackedTexts.from_lists(texts)
    with torch.inference_mode():
        rows_TD = model.hidden(packed)
    assert rows_TD.shape == (packed.num_tokens, model.hidden_size)
    assert rows_TD.dtype == torch.float32
    return [rows_TD[begin:end] for begin, end in pairwise([0, *packed.ends_N.tolist()])]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)
        assert cosine_distance(ours.numpy(), theirs.numpy()) < 2e-6


@cache
def native(**changes) -> NativeEncoder:
    return NativeEncoder(make_model(**changes))


@pytest.mark.parametrize("name", ["bert", "bert-tanh-gelu", "roberta", "camembert", "distilbert"])
def test_embeddings_are_those_of_transformers(name, tmp_path) -> None:
    sizes = DISTIL_SIZES if name == "distilbert" else SIZES
    folder = make_tiny_encoder(name, tmp_path, **sizes)
    backend = TorchEncoder.load(resolve_model(str(folder)), task="embed", device="cpu")
    assert backend.info.dtype == "int16"
    texts = make_texts(*LENGTHS, lowest=0)  # those that name the padding token included
    got = backend.execute(PackedTexts.from_lists(texts))
    assert cosine_distance(got, mean_states(folder, texts)) < 2e-6


@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_states_are_those_of_torch_at_any_length(num_heads, activation) -> None:
    changes = {"num_heads": num_heads, "activation": activation}
    texts = make_texts(*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 300, 511, 512)
    assert_close(states(native(**changes), texts), states(make_model(**changes), texts))


def test_results_do_not_depend_on_the_batch() -> None:
    """Bit by bit: alone, in any order, among others, and with any number of threads."""
    rng = random.Random(0)
    texts = make_texts(*(rng.randint(1, 40) for _ in range(60)), 200, 512, seed=1)
    model, num_threads = native(), torch.get_num_threads()
    alone = [states(model, [ids])[0] for ids in texts]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (1, 2, 7, 62):
                order = rng.sample(range(len(texts)), count)
                for index, rows in zip(
                    order, states(model, [texts[index] for index in order]), strict=True
                ):
                    assert torch.equal(rows, alone[index])
    finally:
        torch.set_num_threads(num_threads)


def test_the_largest_sums_fit() -> None:
    """Rows and weights of equal numbers have the largest sums that their norms allow."""
    made = []
    for _ in range(2):
        model = make_model(hidden_size=384, intermediate_size=768, num_heads=6)
        for layer in model.layers:
            for norm in (model.embedding_norm, layer.attention_norm, layer.output_norm):
                norm.weight_D *= 1e-3
                norm.bias_D.fill_(3.0)
            layer.qkv.weight_OI.fill_(0.01)
            layer.up.weight_OI.fill_(0.05)
            layer.down.weight_OI.fill_(-0.05)
        made.append(model)
    texts = make_texts(1, 5, 300)
    assert_close(states(NativeEncoder(made[0]), texts), states(made[1], texts))


def test_it_is_far_more_exact_than_bfloat16() -> None:
    """Also with a few large dimensions, as trained models have them. Of bfloat16 the weights alone
    are rounded here.
    """
    texts = make_texts(*LENGTHS)
    for size in (1.0, 10.0):
        models = [make_model() for _ in range(3)]
        for model in models:
            for layer in model.layers:
                layer.attention_norm.weight_D[[3, 70]] *= size
                layer.output_norm.weight_D[[3, 70]] *= size
        exact, ours, rounded = models
        for layer in rounded.layers:
            for linear in (layer.qkv, layer.out, layer.up, layer.down):
                linear.weight_OI = linear.weight_OI.bfloat16().float()
        want = torch.cat(states(exact, texts)).numpy()
        error, of_bfloat16 = (
            cosine_distance(torch.cat(states(model, texts)).numpy(), want)
            for model in (NativeEncoder(ours), rounded)
        )
        assert error < of_bfloat16 / 10


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_text(number) -> None:
    model = make_model()
    model.word_VD[17, 5] = number
    texts = [[ids for ids in text if ids != 17] for text in make_texts(9, 30, 20)]
    clean = states(native(), texts)
    texts[1][4] = 17
    got = states(NativeEncoder(model), texts)
    assert not got[1].isfinite().any()
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2], clean[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 144, "num_heads": 3},
        {"num_heads": 8},
        {"intermediate_size": 400},
        {"activation": "relu"},
    ],
)
def test_other_sizes_and_activations_are_left_to_torch(changes) -> None:
    assert supports(make_model(), device=CPU)
    assert not supports(make_model(**changes), device=CPU)
    assert not supports(make_model(), device=torch.device("cuda"))


def test_float32_and_missing_kernels_are_torch(tmp_path, monkeypatch) -> None:
    files = resolve_model(str(make_tiny_encoder("bert", tmp_path, **SIZES)))

    def number(dtype: str) -> str:
        return TorchEncoder.load(files, task="embed", device="cpu", dtype=dtype).info.dtype

    assert number("float32") == "float32"
    assert number("bfloat16") == "int16"
    kernels.load.cache_clear()
    monkeypatch.setenv("HEADRACE_KERNELS", "off")
    assert number("bfloat16") == "bfloat16"
    kernels.load.cache_clear()


def test_it_says_what_it_is_and_where_its_time_went() -> None:
    reference, model = make_model(), NativeEncoder(make_model())
    assert (model.hidden_size, model.vocab_size, model.max_len) == (128, VOCAB_SIZE, 512)
    assert model.num_parameters == reference.num_parameters
    assert reference.weights_bytes / 2 < model.weights_bytes < reference.weights_bytes
    states(model, make_texts(*LENGTHS))
    times = model.times()
    assert min(times.products_s, times.attention_s, times.rows_s) > 0


def test_memory_is_bounded() -> None:
    """What a batch takes beyond what the model says it does is the same for any batch."""
    model = NativeEncoder(make_model())
    states(model, make_texts(512))
    assert len(model._runner._scratch._memory) <= model.scratch_bytes + 64
    states(model, make_texts(*[512] * 4, *[30] * 300))
    assert len(model._runner._scratch._memory) <= model.scratch_bytes + 64
    assert model.activation_bytes_per_token >= 4 * model.hidden_size
