"""openai-agents, over Responses and over chats."""

from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from conftest import CITIES, MODEL, QUESTION, TOKENS
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

set_tracing_disabled(True)


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Ulm"]


def run(url: str, kind, settings: ModelSettings, **more):
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="unused"))
    agent = Agent(name="it", instructions="Be brief.", model=model, model_settings=settings, **more)
    return Runner.run_sync(agent, QUESTION, max_turns=2).final_output


def test_an_agent_answers(same) -> None:
    """Over chats: of Responses this client takes no answer that `max_tokens` has cut, and this model ends none."""
    settings = ModelSettings(temperature=0.0, max_tokens=TOKENS)
    assert same(lambda url: run(url, OpenAIChatCompletionsModel, settings))


def test_an_agent_answers_with_a_model(same) -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        settings = ModelSettings(temperature=0.0, max_tokens=100)
        found = same(lambda url, kind=kind, settings=settings: run(url, kind, settings, output_type=Weather))
        assert found.city in CITIES
