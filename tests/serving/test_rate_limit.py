"""Rate limits: token buckets, and who a client is behind a proxy."""

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import ask, service_of
from starlette.datastructures import Headers

from pfml.cli import main
from pfml.serving import Access, create_app
from pfml.serving.client_address import TrustedProxies
from pfml.serving.rate_limit import RateLimit, RateLimiter

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def admitted_by_oracle(rate, times):
    """A token bucket as books have it: `requests` tokens at first, refilled evenly."""
    tokens, last, found = float(rate.requests), times[0], []
    for time in times:
        tokens = min(tokens + (time - last) * rate.requests / rate.seconds, rate.requests)
        last = time
        found.append(tokens >= 1 - 1e-9)
        tokens -= found[-1]
    return found


@pytest.mark.parametrize("text", ["1/s", "3/s", "10/s", "30/m"])
def test_a_bucket_admits_what_a_token_bucket_admits(text):
    clock = Clock()
    rate = RateLimit.parse(text)
    limiter = RateLimiter(rate, clock=clock)
    times = [1000.0 + k * k % 97 * 0.037 + k * 0.11 for k in range(200)]
    times.sort()
    found = []
    for clock.now in times:
        found.append(limiter.wait("10.0.0.1") == 0)
    assert found == admitted_by_oracle(rate, times)
    assert True in found
    assert False in found


def test_the_wait_that_is_told_is_enough():
    clock = Clock()
    limiter = RateLimiter(RateLimit(2, 1.0), clock=clock)
    assert [limiter.wait("a") for _ in range(2)] == [0, 0]
    wait = limiter.wait("a")
    assert wait == pytest.approx(0.5)
    clock.now += wait
    assert limiter.wait("a") == 0


def test_clients_have_buckets_of_their_own_and_a_network_of_ipv6_has_one():
    limiter = RateLimiter(RateLimit(1, 3600.0), clock=Clock())
    assert limiter.wait("10.0.0.1") == 0
    assert limiter.wait("10.0.0.1") > 0
    assert limiter.wait("10.0.0.2") == 0
    assert limiter.wait("2001:db8::1") == 0
    assert limiter.wait("2001:db8::ffff:2") > 0


def test_processes_share_their_buckets(tmp_path):
    clock = Clock()
    one, other = (RateLimiter(RateLimit(1, 3600.0), tmp_path / "buckets", b"key", clock) for _ in range(2))
    assert one.wait("a") == 0
    assert other.wait("a") > 0


@pytest.mark.parametrize("text", ["", "10", "0/s", "10/d", "-1/s", "1.5/s", "10 / s", "10/s "])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="such as 10/s, got"):
        RateLimit.parse(text)


def test_a_client_beyond_its_limit_gets_429_with_a_time(made_run):
    app = create_app(service_of(made_run), Access(rate_limit=RateLimit(3, 3600)))
    for _ in range(3):
        assert ask(app, "GET", "/api/images/3").status_code == 200
    answer = ask(app, "GET", "/api/images/3")
    assert answer.status_code == 429
    assert 1100 <= int(answer.headers["retry-after"]) <= 1200
    assert "a client may send 3/h requests" in answer.json()["error"]
    assert ask(app, "POST", "/login", data={"token": "x"}).status_code == 429
    for path in ("/", "/page/style.css", "/health", "/ready", "/metrics", "/api/images/3/jpeg"):
        assert ask(app, "GET", path).status_code == 200, path


def client_of(proxies, peer, *forwarded, proto=None):
    headers = [(b"x-forwarded-for", one.encode()) for one in forwarded]
    if proto:
        headers.append((b"x-forwarded-proto", proto.encode()))
    scope = {"type": "http", "client": (peer, 1), "scheme": "http", "headers": headers}
    found = TrustedProxies(proxies)
    return found.client(scope, Headers(scope=scope)), found.scheme(scope, Headers(scope=scope))


def test_only_a_trusted_proxy_says_who_the_client_is():
    assert client_of((), "10.0.0.1", "9.9.9.9", proto="https") == ("10.0.0.1", "http")
    assert client_of(("10.0.0.1",), "10.0.0.1", "9.9.9.9", proto="https") == ("9.9.9.9", "https")
    assert client_of(("10.0.0.1",), "10.0.0.2", "9.9.9.9", proto="https") == ("10.0.0.2", "http")
    assert client_of(("10.0.0.0/24",), "::ffff:10.0.0.7", "2001:db8::1")[0] == "2001:db8::1"


def test_the_last_address_that_is_no_proxy_counts_whatever_a_client_writes_before_it():
    trusted = ("10.0.0.0/24",)
    assert client_of(trusted, "10.0.0.1", "1.1.1.1, 9.9.9.9, 10.0.0.2")[0] == "9.9.9.9"
    assert client_of(trusted, "10.0.0.1", "1.1.1.1", "9.9.9.9")[0] == "9.9.9.9"
    assert client_of(trusted, "10.0.0.1", "9.9.9.9, nonsense")[0] == "10.0.0.1"
    assert client_of(trusted, "10.0.0.1")[0] == "10.0.0.1"
    assert client_of(trusted, "10.0.0.1", "10.0.0.3")[0] == "10.0.0.3"


def test_limits_ids_and_cookies_behind_a_proxy(made_run):
    token = "a token of enough letters"
    access = Access(token=token, rate_limit=RateLimit(1, 3600), trusted_proxies=("127.0.0.1",))
    app = create_app(service_of(made_run), access)
    headers = {"x-forwarded-proto": "https", "x-request-id": "of-the-proxy"}
    answer = ask(app, "POST", "/login", data={"token": token}, headers={**headers, "x-forwarded-for": "9.9.9.9"})
    assert answer.status_code == 303
    assert "Secure" in answer.headers["set-cookie"]
    assert answer.headers["x-request-id"] == "of-the-proxy"
    again = ask(app, "POST", "/login", data={"token": token}, headers={**headers, "x-forwarded-for": "9.9.9.9"})
    assert again.status_code == 429
    other = ask(
        app, "POST", "/login", data={"token": token}, headers={"x-forwarded-for": "9.9.9.8", "x-request-id": "\n"}
    )
    assert (other.status_code, len(other.headers["x-request-id"])) == (303, 16)


@pytest.mark.parametrize("option", ["--rate-limit=fast", "--trusted-proxy=proxy.example", "--processes=0"])
def test_options_are_refused_before_the_model_is_loaded(option, tmp_path):
    with pytest.raises(SystemExit, match=r"such as 10/s|networks such as|at least 1"):
        main(["serve", str(tmp_path), option])
