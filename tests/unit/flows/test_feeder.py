"""Long prompts are cut in the row's own text until they fit, and never in the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pytest

from flows.busy import Meter
from flows.feeder import Feeder, PromptLimits, PromptTooLong, Settled
from flows.fleet.messages import Assign
from flows.prompts import PromptRenderer
from flows.queues import Outbox, RequestQueue
from flows.spec import JobSpec
from storage.rows import Row
from storage.shards import Shard
from tests.e2e.jobs import WordTokenizer
from workers.request import Request, SamplingParams

HEAD, TAIL = " ".join(["system"] * 80), "assistant"
SCHEMA = pa.schema([("text", pa.string())])


class ChatWords(WordTokenizer):
    """Words, with a chat template that is much longer than most prompts."""

    has_chat_template = True

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        return f"{HEAD} {messages[-1]['content']} {TAIL}"


def feed(
    texts: Sequence[str], on_too_long: str, meter: Meter | None = None
) -> tuple[list[Request], list[Settled]]:
    """What becomes of these rows with a model of 100 tokens and completions of 10."""
    spec = JobSpec.model_validate({"input": "in.parquet", "prompt": {"column": "text"}})
    requests, outbox = RequestQueue(100), Outbox(100)
    rows = [Row(i, f"row{i}", {"text": text}) for i, text in enumerate(texts)]
    feeder = Feeder(
        read=lambda _: iter([rows]),
        renderer=PromptRenderer(spec, SCHEMA).bind(ChatWords()),
        encoder=ChatWords(),
        limits=PromptLimits(max_model_len=100, max_tokens=10, on_too_long=on_too_long),
        sampling=SamplingParams(max_tokens=10),
        requests=requests,
        outbox=outbox,
        in_flight={},
        meter=meter,
    )
    feeder.submit(Assign(Shard(0, (), 0), np.arange(len(rows))))
    feeder.close()
    feeder.run()
    return requests.take(100, wait=False), outbox.take(timeout_s=0)


WORDS = [f"w{i}" for i in range(5000)]


@pytest.mark.parametrize("count", [19, 30, 200, 5000])
@pytest.mark.parametrize("side", ["left", "right"])
def test_c15_what_is_left_fits_and_keeps_the_template_and_one_side(count: int, side: str) -> None:
    text = " ".join(WORDS[:count])
    (request,), settled = feed([text], f"truncate_{side}")
    assert not settled
    encode = ChatWords().encode_batch
    head, own, tail = encode([HEAD, text, TAIL], add_special_tokens=False)
    ids = list(request.prompt_token_ids)
    assert len(ids) <= 90
    assert ids[:80] == head
    assert ids[-1:] == tail
    kept = ids[80:-1]
    assert 5 <= len(kept) <= 9
    # The character cut may split the outermost word.
    inner = kept[1:] if side == "left" else kept[:-1]
    assert inner == (own[-len(inner) :] if side == "left" else own[: len(inner)])


def test_c15_prompts_that_fit_are_left_alone() -> None:
    text = " ".join(WORDS[:18])
    (request,), _ = feed([text], "truncate_left")
    assert len(request.prompt_token_ids) == 99


def test_c15_error_and_fail() -> None:
    rows = ["short", " ".join(WORDS[:30])]
    (request,), (settled,) = feed(rows, "error")
    assert request.request_id == "row0"
    assert settled.error.type == "prompt_too_long"
    with pytest.raises(PromptTooLong, match="row1: the prompt has 111 tokens; the model takes 100"):
        feed(rows, "fail")


def test_each_kind_of_its_work_is_counted() -> None:
    meter = Meter("feeder")
    feed(WORDS[:50], "error", meter)
    found = {work.work: work for work in meter.works()}
    assert found.keys() == {"reading", "templating", "tokenising"}
    assert all(work.elapsed_s > 0 and (work.cpu_s or 0) >= 0 for work in found.values())
