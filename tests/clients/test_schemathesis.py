"""schemathesis finds no failure, and no answer that /openapi.json does not describe."""

from pathlib import Path

import pytest

from tests.clients.page import between

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]  # environments may have to be built

CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def test_the_document(client):
    schemathesis = client("schemathesis", "sdks", ["schemathesis"])
    (schemathesis.directory / CONFIG.name).write_bytes(CONFIG.read_bytes())
    schemathesis.run_and_tell(
        "schemathesis", "--config-file", CONFIG.name, "run", f"{schemathesis.url}/openapi.json",
        "--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--max-examples", "20", "--seed", "1",
        "--warnings", "off", "--no-color",
        excerpt=lambda output: between(output, "= SUMMARY =", r"=+ .* in .*=+"),
    )  # fmt: skip
