"""What a config.json may say: refusals that name key and value, and windows by family."""

from __future__ import annotations

import pytest

from tests.unit.workers.tiny_models import SIZES
from workers.errors import ModelError
from workers.models.config import ConfigReader
from workers.models.registry import find_family

LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are LlamaForCausalLM"),
        ({"architectures": None}, "architecture is None"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads, but they are 6 and 4"),
        ({"head_dim": 15}, "head_dim must be even, but is 15"),
        ({"hidden_size": "72"}, "hidden_size is '72'; a whole number above 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None; a number is wanted"),
        ({"rope_scaling": "linear"}, "an object is wanted"),
        ({"quantization_config": {"bits": 4}}, "only unquantised weights"),
        ({"tie_word_embeddings": "yes"}, "true or false is wanted"),
    ],
)
def test_configs_that_cannot_be_are_refused_with_key_and_value(changes, message) -> None:
    raw = LLAMA | changes
    with pytest.raises(ModelError, match=message):
        find_family(raw).read_config(raw)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (0, 0, 0)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (0, 0, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
)
def test_windows_by_family(architecture, changes, windows) -> None:
    raw = LLAMA | {"architectures": [architecture]} | changes
    assert find_family(raw).read_config(raw).windows == windows


@pytest.mark.parametrize("types", [["full_attention"], ["linear_attention"] * 3])
def test_unknown_layer_types_are_refused(types) -> None:
    raw = {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": types}
    with pytest.raises(ModelError, match="layer"):
        ConfigReader(raw).layer_windows(0)
