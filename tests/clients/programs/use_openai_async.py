"""The asynchronous `openai` client: many streams at once, and one that is given up. Takes the router's URL."""

import asyncio
import sys

import openai

MODEL = "baton-demo"
COUNTRIES = ["France", "Italy", "Spain", "Norway", "Poland", "Greece", "Japan", "Kenya"]


async def answer(client: openai.AsyncOpenAI, country: str) -> str:
    """Streams one answer."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def main() -> None:
    """Asks about all countries at once, and again one by one."""
    async with openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        together = await asyncio.gather(*(answer(client, country) for country in COUNTRIES))
        assert together == [await answer(client, country) for country in COUNTRIES]
        for text in together:
            print(text)
        given_up = await client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in given_up:
            break
        await given_up.close()
        async with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=100) as stream:
            final = await stream.get_final_response()
        print("responses:", final.status)


asyncio.run(main())
