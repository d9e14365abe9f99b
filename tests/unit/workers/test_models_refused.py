"""Models that cannot be what their config says are refused, by key and value."""

from __future__ import annotations

import json

import pytest

from tests.unit.workers.tiny_models import SIZES, make_tiny_model
from workers.backends.torch_backend import TorchBackend
from workers.errors import ModelError
from workers.loading.files import resolve_model
from workers.models.registry import find_family


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "None"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads.*6 and 4"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 1 << 40}, "no real model"),
        ({"vocab_size": 1 << 40}, "no real vocabulary"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_scaling": [1]}, "an object is wanted"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_a_config_that_cannot_be(change, message) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SIZES} | change
    with pytest.raises(ModelError, match=message):
        find_family(raw).read_config(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 64}, r"mlp.(gate|up|down)_proj.weight.*96"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
    ],
)
def test_weights_that_do_not_match_their_config(tmp_path, change, message) -> None:
    folder = make_tiny_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype="float32")


def test_float16_is_refused_on_a_cpu_by_name(tmp_path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    with pytest.raises(ModelError, match="float16"):
        TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype="float16")
