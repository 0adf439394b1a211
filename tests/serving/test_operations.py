"""Operations: probes, metrics, the access log, versions in answers, and a complete OpenAPI document."""

import io
import json
import re
import time

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import application, ask, got, image_bytes, service_of, upload

from pfml.search import ImageIndex
from pfml.serving import Access, create_app
from pfml.serving.access_log import AccessLog
from pfml.serving.rate_limit import RateLimit
from pfml.version import __version__

pytestmark = pytest.mark.usefixtures("one_thread")
TOKEN = "a token of enough letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def app(made_run):
    return application(made_run)


def metrics_of(app, **options):
    """Metric with its labels -> value."""
    answer = ask(app, "GET", "/metrics", **options)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_health_needs_neither_token_nor_index(made_run):
    closed = application(made_run, Access("0.0.0.0", TOKEN))
    closed.service.gallery._is_searchable = False
    assert got(closed, "/health") == {"alive": True, "version": __version__}
    closed.service.searching.close()
    assert got(closed, "/health")["alive"] is True


def test_metrics_count_answers_by_template_and_status_and_name_no_image(made_run):
    app = application(made_run)
    for path in ("/api/images/3", "/api/images/4", "/api/images/999", "/nowhere/secret-name", "/page/style.css"):
        ask(app, "GET", path)
    upload(app, image_bytes())
    upload(app, b"no image")
    found = metrics_of(app)
    count = 'pfml_http_requests_total{method="GET",route="/api/images/{image}",status="%d"}'
    assert (found[count % 200], found[count % 404]) == (2, 1)
    assert found['pfml_http_requests_total{method="GET",route="none",status="404"}'] == 1
    assert found['pfml_http_requests_total{method="GET",route="/page/{file}",status="200"}'] == 1
    assert found['pfml_http_request_seconds_count{method="POST",route="/api/search"}'] == 2
    assert found['pfml_uploads_rejected_total{status="415"}'] == 1
    assert found["pfml_embedding_batch_images_sum"] == 1
    assert found["pfml_index_images"] == 48
    assert found["pfml_index_generation"] == app.service.gallery.index.generation
    assert found["pfml_resident_memory_bytes"] > 2**20
    assert found['pfml_queue_length{queue="search"}'] == 0
    assert found[f'pfml_version{{version="{__version__}"}}'] == 1
    assert not any("secret" in name or ".png" in name for name in found)


def test_the_rejected_upload_that_is_too_large_is_counted(made_run):
    app = application(made_run, upload_bytes=1000)
    assert upload(app, b"\xff" * 70_000).status_code == 413
    assert metrics_of(app)['pfml_uploads_rejected_total{status="413"}'] == 1


def test_metrics_need_the_token(made_run):
    closed = application(made_run, Access("0.0.0.0", TOKEN))
    assert ask(closed, "GET", "/metrics").status_code == 401
    assert metrics_of(closed, headers=BEARER)["pfml_index_images"] == 48


def test_every_answer_has_the_version_and_the_generation(small_run, monkeypatch):
    access = Access("0.0.0.0", TOKEN, rate_limit=RateLimit(4, 3600))
    app = create_app(service_of(small_run), access)
    monkeypatch.setattr(app.service.gallery, "find", lambda *_, **__: 1 / 0)
    asked = {
        200: ("GET", "/health", {}),
        303: ("GET", "/", {}),
        401: ("GET", "/api/status", {}),
        404: ("GET", "/nowhere", BEARER),
        413: ("POST", "/api/edits", {**BEARER, "content-length": "99999999"}),
        421: ("GET", "/health", {"host": "elsewhere.example"}),
        422: ("GET", "/api/images/x", BEARER),
    }
    for status, (method, path, headers) in asked.items():
        answer = ask(app, method, path, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-pfml-version"] == __version__
        assert answer.headers["x-pfml-index"] == str(ImageIndex.open(small_run / "index").generation)
        assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])
    with pytest.raises(ZeroDivisionError):  # the transport of the tests raises what the server logs
        ask(app, "GET", "/api/search?id=3", headers=BEARER)
    assert (
        metrics_of(app, headers=BEARER)['pfml_http_requests_total{method="GET",route="/api/search",status="500"}'] == 1
    )
    answer = ask(app, "GET", "/api/status", headers=BEARER)
    assert (answer.status_code, answer.headers["x-pfml-version"]) == (429, __version__)


def test_a_change_of_the_index_is_seen_at_once_and_changes_the_header(small_run):
    app = application(small_run)
    before = ask(app, "GET", "/api/status")
    index = ImageIndex.open(small_run / "index")  # as another process of the server would
    index.remove(paths=[index.entry(3).path])
    after = ask(app, "GET", "/api/status")
    assert after.json()["images"] == before.json()["images"] - 1
    after = ask(app, "GET", "/health")
    assert int(after.headers["x-pfml-index"]) == int(before.headers["x-pfml-index"]) + 1


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_access_log_has_a_json_object_per_answer_without_query_strings(made_run, tmp_path):
    app = create_app(service_of(made_run), log=AccessLog(str(tmp_path / "log")))
    answer = ask(app, "GET", "/api/images?class_name=secret-class")
    ask(app, "GET", "/api/images/3/jpeg")
    ask(app, "GET", "/secret-path%0A")
    first, second, third = lines_of(tmp_path / "log")
    assert first.keys() == {
        *("time", "method", "route", "status", "seconds", "bytes", "client", "request_id", "process"),
    }
    assert (first["method"], first["route"], first["status"]) == ("GET", "/api/images", 404)
    assert first["bytes"] == len(answer.content)
    assert first["request_id"] == answer.headers["x-request-id"]
    assert first["client"] == "127.0.0.1"
    assert time.strptime(first["time"][:19], "%Y-%m-%dT%H:%M:%S")
    assert second["route"] == "/api/images/{image}/jpeg"
    assert (third["route"], third["status"]) == (None, 404)
    assert "secret" not in (tmp_path / "log").read_text()


def test_the_access_log_survives_its_rotation(made_run, tmp_path):
    app = create_app(service_of(made_run), log=AccessLog(str(tmp_path / "log")))
    ask(app, "GET", "/health")
    (tmp_path / "log").rename(tmp_path / "log.1")
    ask(app, "GET", "/ready")
    assert [line["route"] for line in lines_of(tmp_path / "log.1")] == ["/health"]
    assert [line["route"] for line in lines_of(tmp_path / "log")] == ["/ready"]


def test_the_access_log_may_be_stderr(made_run, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    ask(create_app(service_of(made_run), log=AccessLog("-")), "GET", "/health")
    assert json.loads(terminal.getvalue())["route"] == "/health"


def routes_of(app):
    """All (path, method) of the application that its document should have."""
    found = set()

    def walk(routes):
        for route in routes:
            walk(getattr(route, "routes", None) or [])
            if getattr(route, "include_in_schema", False):
                found.update((route.path, method.lower()) for method in route.methods - {"HEAD"})

    walk(app.app.app.routes)
    return found


def test_the_openapi_document_is_complete(made_run, app):
    schema = got(app, "/api/openapi.json")
    documented = {(path, method) for path, methods in schema["paths"].items() for method in methods}
    expected = {
        *(("/health", "get"), ("/ready", "get"), ("/metrics", "get"), ("/api/embed", "post"), ("/api/images", "post")),
        *(("/api/images/{image}", "delete"), ("/api/search", "get"), ("/api/search", "post"), ("/api/edits", "post")),
    }
    assert expected <= documented
    if found := routes_of(app):
        assert documented == found
    for path, method in documented:
        one = schema["paths"][path][method]
        where = f"{method} {path}"
        assert one["summary"].endswith((".", "file", "JSON")) or len(one["summary"].split()) > 2, where
        assert one["description"], where
        assert one["tags"], where
        codes = one["responses"].keys()
        assert {"401", "421", "429", "500", "503"} <= codes, where
        if method != "get":
            assert {"403", "413"} <= codes, where
        for code, answer in one["responses"].items():
            assert {"X-Pfml-Version", "X-Pfml-Index", "X-Request-ID"} <= answer["headers"].keys(), where
            if code >= "400" and (path, code) != ("/ready", "503"):
                [content] = answer["content"].values()
                assert content["schema"]["$ref"].endswith(("/ErrorResponse", "/HTTPValidationError")), (where, code)
            elif code != "204":
                kind, content = next(iter(answer["content"].items()))
                assert content.get("schema") or kind in ("image/jpeg", "text/plain"), (where, code)
        for parameter in one.get("parameters", []):
            assert parameter["schema"], where
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema)))
    assert references <= schema["components"]["schemas"].keys()


def test_the_openapi_document_says_who_needs_a_token(made_run, app):
    closed = application(made_run, Access("0.0.0.0", TOKEN))
    schema = ask(closed, "GET", "/api/openapi.json", headers=BEARER).json()
    assert schema["paths"]["/metrics"]["get"]["security"] == [{"token": []}, {"session": []}]
    assert schema["paths"]["/health"]["get"]["security"] == []
    assert schema["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert got(app, "/api/openapi.json")["paths"]["/metrics"]["get"]["security"] == []
