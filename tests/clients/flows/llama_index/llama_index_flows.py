"""llama-index."""

from conftest import MODEL, QUESTION, TOKENS
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def test_a_chat_is_answered_and_streamed(same) -> None:
    def ask(url: str) -> str:
        model = OpenAILike(
            model=MODEL, api_base=f"{url}/v1", api_key="unused", is_chat_model=True, temperature=0, max_tokens=TOKENS
        )
        whole = model.chat([ChatMessage(role="user", content=QUESTION)]).message.content
        assert [*model.stream_chat([ChatMessage(role="user", content=QUESTION)])][-1].message.content == whole
        return whole

    assert same(ask)


def test_a_prompt_is_completed(same) -> None:
    def ask(url: str) -> str:
        model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="unused", temperature=0, max_tokens=TOKENS)
        return model.complete("def add(a, b):").text

    assert same(ask)
