"""instructor."""

from typing import Literal

import instructor
import openai
from conftest import CITIES, MODEL, QUESTION
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": QUESTION}]


class Place(BaseModel):
    city: Literal["Bern", "Ulm"]


class Weather(BaseModel):
    """With a model inside, whose schema has references."""

    place: Place
    days: int = Field(ge=1, le=99)


def test_an_answer_is_a_model_whose_schema_has_references(same) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):

        def ask(url: str, mode=mode) -> dict:
            ours = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="unused"), mode=mode)
            weather = ours.chat.completions.create(
                model=MODEL,
                messages=ASKED,
                response_model=Weather,
                temperature=0,
                seed=5,
                max_retries=0,
                max_tokens=200,
            )
            return weather.model_dump()

        assert same(ask)["place"]["city"] in CITIES
