"""pydantic-ai, over chats and over Responses."""

from typing import Literal

from conftest import CITIES, MODEL, QUESTION, TOKENS
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    city: Literal["Bern", "Ulm"]


class Weather(BaseModel):
    place: Place
    days: int = Field(ge=1, le=99)


def test_an_agent_answers(same) -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):

        def ask(url: str, kind=kind) -> str:
            model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))
            return Agent(model).run_sync(QUESTION, model_settings={"temperature": 0.0, "max_tokens": TOKENS}).output

        assert same(ask)


def test_an_agent_answers_with_a_model(same) -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):

        def ask(url: str, kind=kind) -> Weather:
            model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))
            agent = Agent(model, output_type=Weather)
            return agent.run_sync(QUESTION, model_settings={"temperature": 0.0, "max_tokens": 300}).output

        assert same(ask).place.city in CITIES
