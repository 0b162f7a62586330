"""Libraries that talk to OpenAI and Anthropic: each has a program, which checks what it gets."""

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]  # environments may have to be built


@pytest.mark.parametrize(
    ("title", "environment", "packages", "program"),
    [
        ("openai", "sdks", ["openai"], "use_openai.py"),
        ("openai, asynchronous", "sdks", ["openai"], "use_openai_async.py"),
        ("anthropic", "sdks", ["anthropic"], "use_anthropic.py"),
        ("LangChain", "langchain", ["langchain-openai", "langchain-core"], "use_langchain.py"),
    ],
)
def test_program(client, title, environment, packages, program):
    client(title, environment, packages).run_program(program)
