"""inspect-ai."""

from conftest import MODEL, QUESTION, TOKENS, URLS
from inspect_ai.model import GenerateConfig, get_model


async def test_inspect_generates() -> None:
    texts = []
    for url in URLS:
        model = get_model(f"openai-api/outrider/{MODEL}", base_url=f"{url}/v1", api_key="unused", memoize=False)
        answer = await model.generate(QUESTION, config=GenerateConfig(temperature=0, max_tokens=TOKENS))
        texts.append(answer.completion)
    assert texts[0] == texts[1] != ""
