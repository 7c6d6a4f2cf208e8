"""outlines, as for OpenAI and as for vLLM."""

from typing import Literal

import openai
import outlines
from conftest import CITIES, MODEL, QUESTION
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Ulm"]


def test_an_answer_follows_a_model(same) -> None:
    for kind in (outlines.from_openai, outlines.from_vllm):

        def ask(url: str, kind=kind) -> str:
            model = kind(openai.OpenAI(base_url=f"{url}/v1", api_key="unused"), MODEL)
            return model(QUESTION, Weather, temperature=0, max_tokens=60)

        assert Weather.model_validate_json(same(ask)).city in CITIES


def test_an_answer_follows_an_expression_and_a_choice(same) -> None:
    for wanted in (outlines.types.Regex("[a-c]{4}"), Literal["yes", "no"]):

        def ask(url: str, wanted=wanted) -> str:
            model = outlines.from_vllm(openai.OpenAI(base_url=f"{url}/v1", api_key="unused"), MODEL)
            return model(QUESTION, wanted, temperature=0, max_tokens=60)

        assert len(same(ask)) in (2, 3, 4)
