"""Models that come and go while the router runs."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
import yaml

from common.demo_model import demo_model_path
from common.errors import ConfigError
from router.admission.config import AdmissionConfig
from router.serving.config import ModelsConfig
from router.serving.model_sources import read_models
from router.testing import FakeDecodePod

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of models whose chat templates differ, by name."""
    found = {}
    for name in ("alpha", "beta", "new-beta"):
        directory = found[name] = tmp_path_factory.mktemp(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / file, directory)
        (directory / "chat_template.jinja").write_text(f"{name}: {{{{ messages[0].content }}}}")
    return {name: str(directory) for name, directory in found.items()}


class ModelsFile:
    """The file of a running router."""

    def __init__(self, file):
        self.path = str(file)
        self.cluster = None

    def write(self, **models):
        with open(self.path, "w") as file:
            yaml.safe_dump(models, file, sort_keys=False)

    async def change(self, condition, **models):
        """Returns when the router has read these models, and the condition holds."""
        self.write(**models)
        await self.reread(condition)

    async def reread(self, condition):
        self.cluster.router.reload()
        async with asyncio.timeout(30):
            await self.cluster.until(condition)

    def serves(self, *names):
        """A condition: these are served, and can be."""
        models = self.cluster.router.service.models
        return [name for model in models if model.pods.can_serve for name in model.names] == list(names)


@pytest.fixture
async def models_file(start_cluster, directories, tmp_path):
    """Of a router with a pod of alpha, and one of beta, of which only alpha is named."""
    file = ModelsFile(tmp_path / "models.yaml")
    file.write(alpha=directories["alpha"])
    pods = [FakeDecodePod(model_name=name, fingerprint=name.encode()) for name in ("alpha", "beta")]
    admission = AdmissionConfig(max_inflight=1)
    file.cluster = await start_cluster([], pods, wait=False, models_file=file.path, admission=admission)
    await file.cluster.until(lambda: file.serves("alpha"))
    return file


async def metrics_of(cluster):
    return (await cluster.client.get("/metrics")).text


async def ask(cluster, model, **body):
    return await cluster.client.post(PATH, json={"model": model, "messages": MESSAGES, "max_tokens": 4, **body})


async def test_a_model_is_added_and_removed(models_file, directories, caplog):
    caplog.set_level("INFO")
    cluster, serves = models_file.cluster, models_file.serves
    pod = cluster.decode[1]
    alpha, beta = {"alpha": directories["alpha"]}, {"beta": directories["beta"], "b": directories["beta"]}
    assert (await ask(cluster, "beta")).status_code == 404

    await models_file.change(lambda: serves("alpha", "beta", "b"), **alpha, **beta)
    assert (await ask(cluster, "b")).json()["model"] == "beta"
    assert "the model beta, b was added" in caplog.text

    await pod.allow(2)
    running = asyncio.create_task(ask(cluster, "beta"))
    await pod.until(lambda: len(pod.submits) == 2)
    waiting = asyncio.create_task(ask(cluster, "beta"))
    while cluster.router.service.num_under_way != 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await models_file.change(lambda: serves("alpha"), **alpha)
    refused = await ask(cluster, "beta")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    assert [card["id"] for card in (await cluster.client.get("/v1/models")).json()["data"]] == ["alpha"]
    await pod.allow(None)
    for answer in await asyncio.gather(running, waiting):
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)
    assert "the model beta, b was removed" in caplog.text

    await models_file.change(lambda: not cluster.router.service.models)
    assert (await cluster.client.get("/readyz")).json()["reason"] == "no model is served"
    await models_file.change(lambda: serves("alpha"), **alpha)
    assert (await ask(cluster, "alpha")).status_code == 200


async def test_a_model_is_replaced_while_its_streams_go_on(models_file, directories, tokenizer):
    cluster, serves = models_file.cluster, models_file.serves
    pod = cluster.decode[1]
    await models_file.change(lambda: serves("beta"), beta=directories["beta"])
    await pod.allow(2)
    running = asyncio.create_task(ask(cluster, "beta"))
    await pod.until(lambda: len(pod.submits) == 1)
    before = cluster.router.service.model("beta")
    await models_file.change(lambda: serves("beta") and not before.pods.can_serve, beta=directories["new-beta"])
    await pod.allow(None)
    assert (await running).status_code == (await ask(cluster, "beta")).status_code == 200
    prompts = [tokenizer.decode(list(submit.request.prompt_token_ids)) for submit in pod.submits]
    assert prompts == ["beta: Hi", "new-beta: Hi"]
    await cluster.until_quiet()


async def test_a_file_or_a_model_that_cannot_be_read_changes_nothing(models_file, directories, caplog, tmp_path):
    cluster, serves = models_file.cluster, models_file.serves
    absent = str(tmp_path / "absent")
    failed = lambda number: lambda: cluster.metric("baton_router_model_failures_total") == number  # noqa: E731
    models_file.write(alpha=absent, gamma=absent)
    cluster.router.reload()
    while not failed(1)():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert serves("alpha")
    assert f"cannot serve the model alpha, gamma: --models-file: {absent} is no directory" in caplog.text
    (tmp_path / "absent").symlink_to(directories["beta"])
    await models_file.reread(lambda: serves("alpha", "gamma"))
    models_file.write(alpha="/absent", gamma=directories["new-beta"])
    cluster.router.reload()
    while not failed(3)():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert serves("alpha", "gamma")
    assert f"cannot serve the model gamma: its name stays with {absent}" in caplog.text
    for text, problem in (("alpha: 5", "alpha: expected a directory or a hub id, got 5"), ("- a", "expected name: ")):
        (tmp_path / "models.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"--models-file: .*{problem}"):
            read_models(ModelsConfig(models_file=models_file.path))


async def test_requests_of_a_removed_model_end_with_their_deadlines(models_file, directories):
    """Then its pods are refused, and its metrics end."""
    cluster = models_file.cluster
    await models_file.change(lambda: models_file.serves("alpha", "beta"), **directories)
    service = cluster.router.service
    beta = service.model("beta")
    service.remove_model(beta)
    removal = service._removals[beta.model_id]
    assert removal.when() - asyncio.get_running_loop().time() > service.config.request_timeout_s
    assert beta.pods.can_serve
    await ask(cluster, "alpha")
    assert 'model_name="beta"' in await metrics_of(cluster)
    removal.cancel()
    service._forget(beta)
    metrics = await metrics_of(cluster)
    assert 'model_name="beta"' not in metrics
    assert cluster.metric("baton_router_request_success_total", model_name="alpha", finished_reason="length") == 1
    assert not beta.pods.can_serve
    pod = cluster.router.cluster.by_address[cluster.decode[1].address]
    assert "it serves the model 'beta', and this router serves alpha" in pod.detail


async def test_the_metrics_of_a_model_stay_if_it_was_replaced(models_file, directories):
    cluster = models_file.cluster
    service = cluster.router.service
    before = service.model("alpha")
    await models_file.change(
        lambda: models_file.serves("alpha") and service.models != [before], alpha=directories["beta"]
    )
    await ask(cluster, "alpha")
    service._removals[before.model_id].cancel()
    service._forget(before)
    assert cluster.metric("baton_router_request_success_total", model_name="alpha", finished_reason="length") == 1


async def test_a_hub_that_does_not_answer_holds_up_neither_requests_nor_the_shutdown(
    models_file, directories, monkeypatch, caplog
):
    caplog.set_level("INFO")
    cluster, may_end, reading = models_file.cluster, threading.Event(), []

    def download(model, **options):
        reading.append((model, threading.current_thread()))
        may_end.wait(60)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("router.serving.model_roster._READ_TIMEOUT_S", 0.1)
    models_file.write(alpha=directories["alpha"], tiny="acme/tiny")
    cluster.router.reload()
    while cluster.metric("baton_router_model_failures_total") != 1:
        assert (await ask(cluster, "alpha")).status_code == 200
    ((model, thread),) = reading
    was_alive = thread.is_alive()
    may_end.set()
    assert (model, was_alive, thread.daemon) == ("acme/tiny", True, True)
    assert "reading the tokenizer of acme/tiny from the hub" in caplog.text
    assert "cannot serve the model tiny: it was not read within 0.1 s" in caplog.text
    await models_file.change(lambda: models_file.serves("alpha"), alpha=directories["alpha"])


def test_one_setting_says_which_models_there_are():
    for settings, problem in (
        ({"models": {"a": "x"}}, "--models-file and --models exclude each other"),
        ({"model": "y"}, "--models-file and --model exclude each other"),
    ):
        with pytest.raises(ValueError, match=problem):
            ModelsConfig(models_file="models.yaml", **settings)
