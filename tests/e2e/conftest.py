"""For end-to-end tests: a small random model with a tokenizer, in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.services.postgres import postgres, postgres_bin
from tests.services.prefect_server import PrefectServer
from tests.services.prefect_server import prefect_server as running_prefect_server

SAMPLE = Path(__file__).parents[2] / "flows" / "samples" / "debian_packages.parquet"
END, START, BLANK = "<|im_end|>", "<|im_start|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def sample_texts() -> list[str]:
    """The sample's 300 descriptions."""
    return pq.read_table(SAMPLE)["description"].to_pylist()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, sample_texts: list[str]) -> Path:
    """A Llama of 2 layers with random weights: milliseconds a row, the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained_tokenizer(sample_texts),
        eos_token=END,
        pad_token=BLANK,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _trained_tokenizer(texts: list[str]) -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[BLANK, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One Prefect server on PostgreSQL for all tests that ask for it."""
    if postgres_bin() is None:
        pytest.skip("PostgreSQL is not installed")
    folder = tmp_path_factory.mktemp("prefect")
    with (
        postgres(folder / "postgres.log") as database_url,
        running_prefect_server(folder, database_url) as server,
    ):
        yield server
