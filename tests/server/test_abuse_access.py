"""Access: keys on every route, nothing shared between tenants, names that cannot be abused."""

from __future__ import annotations

import hmac
from importlib import import_module
from typing import Any

import pytest
from starlette.datastructures import Headers

from quire.server import auth
from quire.server.app import ROUTE_MODULES
from quire.server.auth import ApiKeys
from quire.server.errors import ApiError
from quire.server.routes.engine import ROUTES as ENGINE_ROUTES
from quire.server.routes.page import ROUTES as PAGE_ROUTES
from tests.server.attacked_server import ADMIN, KEYS, AttackedServer, request_head, statuses

TEXT = "/v1/completions"
ROUTES = [
    *(route for name in (*ROUTE_MODULES, "admin") for route in import_module(f"quire.server.routes.{name}").ROUTES),
    *ENGINE_ROUTES,
]
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")


class TestKeys:
    def test_every_path_and_method_except_probes_needs_a_key(self, attacked: AttackedServer) -> None:
        assert {route.path for route in ROUTES if route.is_public} == {"/health", "/ping"}
        for path in {route.path.replace("{model:path}", "tiny").replace("{model}", "tiny") for route in ROUTES}:
            for method in METHODS:
                status = attacked.request(method, path, None).status_code
                assert status == 401 or path in ("/health", "/ping"), (method, path, status)
        for path in ("/health", "/health/", "/ping", "/ping/"):
            assert attacked.request("GET", path, None).status_code == 200

    def test_the_page_and_its_files_are_public_and_nothing_else_below_them(self, attacked: AttackedServer) -> None:
        assert {route.path for route in PAGE_ROUTES} == {"/", "/page/settings", "/page/files/{file}"}
        assert attacked.request("GET", "/", None).status_code == 200
        assert attacked.request("POST", "/", None).status_code == 405
        for path in ("/page/", "/page/x", "/page/../v1/models", "/page/files/..%2f..%2fserve.py", "/page//v1/models"):
            answer = attacked.exchange(request_head(path, None, "connection: close", method="GET", key=None))
            assert statuses(answer) == [404]

    @pytest.mark.parametrize(
        "path",
        ["/docs", "/redoc", "/pagex", "/v1/engine", "/v1/engine/feed", "/v1/page/settings",
         "/v1", "/v1/", "/v1/modelsx", "/nothing", "/admin", "/admin/", "/admin/x", "*",
         "/V1/MODELS", "/v1/models/", "/health/../v1/models", "/health//", "/healthx", "/health%2f..%2fv1/models",
         "/health;x", "/HEALTH", "/static/..%2f..%2fetc/passwd", "/admin%2fstats", "/./v1/models", "//v1/models",
         "/%2e%2e/v1/models"],
    )  # fmt: skip
    def test_unknown_paths_need_a_key_too(self, attacked: AttackedServer, path: str) -> None:
        assert statuses(attacked.exchange(request_head(path, None, "connection: close", method="GET", key=None))) == [
            401
        ]

    @pytest.mark.parametrize(
        "shown",
        ["Bearer", "Bearer ", "Bearer  ", "alpha", "Basic alpha", "Bearer alph", "Bearer alphaa", "Bearer ALPHA",
         "bearer  beta x", "Bearer alpha,beta", "Bearer \xff\xfe", "Bearer boss", "Bearer " + "a" * 50_000,
         "Bearer alpha\tx"],
    )  # fmt: skip
    def test_invalid_keys_are_rejected(self, attacked: AttackedServer, shown: str) -> None:
        data = request_head("/v1/models", None, "connection: close", method="GET", key=None)
        data = data[:-2] + b"authorization: " + shown.encode("latin-1") + b"\r\n\r\n"
        assert statuses(attacked.exchange(data)) == [401]

    def test_a_second_authorization_header_is_not_tried(self, attacked: AttackedServer) -> None:
        lines = ["authorization: Bearer wrong", "authorization: Bearer alpha", "connection: close"]
        assert statuses(attacked.exchange(request_head("/v1/models", None, *lines, method="GET", key=None))) == [401]

    def test_admin_routes_need_the_admin_key(self, attacked: AttackedServer) -> None:
        admin = [route for route in ROUTES if route.path.startswith("/admin/")]
        assert admin
        for route in admin:
            for key in KEYS:
                assert attacked.request(route.method, route.path, key).status_code == 401
            path = route.path.replace("/feed", "/feed?frames=1").replace("{block}", "1")
            answer = attacked.request(route.method, path, ADMIN)
            is_let_in = answer.status_code == 200 or "enable_expert_parallel" in answer.text
            is_let_in |= route.path.endswith("/timeline") and "no recent request" in answer.text
            assert is_let_in, answer.text
        for route in ROUTES:
            if route not in admin and not route.is_public:
                assert attacked.request(route.method, route.path.replace("{model}", "tiny"), ADMIN).status_code == 401

    def test_a_key_is_compared_in_constant_time_with_every_known_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[bytes, bytes]] = []

        def compare(first: bytes, second: bytes) -> bool:
            compared.append((first, second))
            return hmac.compare_digest(first, second)

        class Watched:
            compare_digest = staticmethod(compare)

        keys = ApiKeys(["first", "second", "third"])
        monkeypatch.setattr(auth, "hmac", Watched)
        for shown in ("first", "third", "x", "first" * 1000, "ключ"):
            compared.clear()
            raw = [(b"authorization", f"Bearer {shown}".encode())]
            try:
                keys.check(Headers(raw=raw))
            except ApiError as error:
                assert error.status == 401
            assert len(compared) == 3
            assert {len(side) for pair in compared for side in pair} == {32}  # digests: the length does not show

    def test_keys_are_never_logged(self, attacked: AttackedServer) -> None:
        attacked.request("GET", "/v1/models", "not-a-key-of-ours")
        page = attacked.request("GET", "/metrics").text + attacked.request("GET", "/openapi.json").text
        for key in (*KEYS, ADMIN, "not-a-key-of-ours"):
            assert f" {key}" not in attacked.stderr and f'"{key}"' not in page


class TestTenants:
    """The time to first token reveals whether a prompt was cached: only its own tenant may learn it."""

    PROMPT = range(10, 74)

    def cached(self, attacked: AttackedServer, body: dict[str, Any], key: str, **headers: str) -> int:
        answer = attacked.post(TEXT, {"prompt": list(self.PROMPT), "max_tokens": 1, **body}, key, **headers)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def test_tenants_share_no_prefixes(self, attacked: AttackedServer) -> None:
        assert attacked.request("POST", "/admin/reset_prefix_cache", ADMIN).json() == {"is_empty": True}
        assert self.cached(attacked, {}, KEYS[0]) == 0
        assert self.cached(attacked, {}, KEYS[0]) == 48
        assert self.cached(attacked, {}, KEYS[1]) == 0
        assert self.cached(attacked, {}, KEYS[1]) == 48

    def test_a_tenant_cannot_reach_the_prefixes_of_another(self, attacked: AttackedServer) -> None:
        attacked.request("POST", "/admin/reset_prefix_cache", ADMIN)
        assert self.cached(attacked, {"cache_salt": "s"}, KEYS[0]) == 0
        with pytest.raises(ApiError):
            ApiKeys(KEYS).check(Headers({"x-api-key": "x"}))
        name = ApiKeys(KEYS).check(Headers({"x-api-key": KEYS[0]}))
        for tricks in (
            {"cache_salt": f"{name}\0s"},
            {"cache_salt": "s"},
            {"cache_salt": f"\0{name}\0s"},
            {"user": name},
        ):
            assert self.cached(attacked, tricks, KEYS[1], x_tenant=name, x_quire_tenant=name) == 0
            attacked.request("POST", "/admin/reset_prefix_cache", ADMIN)
            self.cached(attacked, {"cache_salt": "s"}, KEYS[0])

    def test_other_routes_do_not_share_prefixes_either(self, attacked: AttackedServer) -> None:
        chat = {"messages": [{"role": "user", "content": "the world " * 30}], "max_tokens": 1}
        text = {"input": "the world " * 30, "max_output_tokens": 16}
        for path, body, field in (
            ("/v1/chat/completions", chat, "prompt_tokens_details"), ("/v1/responses", text, "input_tokens_details"),
            ("/v1/embeddings", {"input": "the world " * 30}, "prompt_tokens_details"),
        ):  # fmt: skip
            attacked.request("POST", "/admin/reset_prefix_cache", ADMIN)
            counts = [
                attacked.post(path, body, key).json()["usage"][field]["cached_tokens"] for key in (*KEYS, KEYS[1])
            ]
            assert counts[:2] == [0, 0]


class TestNames:
    @pytest.mark.parametrize(
        "name", ["../../../etc/passwd", "/etc/passwd", "..\\..\\x", "a/../../b", "~root", "%00", "con"]
    )
    def test_names_are_never_used_as_paths(self, attacked: AttackedServer, name: str) -> None:
        """They are echoed unchanged or refused; no file is created (the fixture checks) and none is read."""
        body = {"prompt": "abc", "max_tokens": 1}
        answer = attacked.post(TEXT, {**body, "request_id": name})
        assert answer.status_code == 200 and answer.json()["id"] == f"cmpl-{name}"
        assert attacked.post(TEXT, body, x_request_id=name).status_code == 200
        assert attacked.post(TEXT, {**body, "model": name}).status_code == 404
        assert attacked.post(TEXT, {**body, "cache_salt": name, "user": name}).status_code == 200
        answer = attacked.request("GET", f"/v1/models/{name}")
        assert answer.status_code in (404, 405) and "root:" not in answer.text
        text = {"input": "abc", "max_output_tokens": 16}
        assert attacked.post("/v1/responses", {**text, "previous_response_id": name}).status_code == 404
        assert attacked.post("/v1/responses", {**text, "conversation": name}).status_code == 404
        grammar = {"grammar": name}
        assert attacked.post(TEXT, {**body, "structured_outputs": grammar}).status_code == 400

    def test_the_same_id_twice_at_once_is_two_requests(self, attacked: AttackedServer) -> None:
        one = request_head(TEXT, None, "x-request-id: same", "transfer-encoding: chunked")
        data = b'{"prompt": "abc", "n": 8, "max_tokens": 100, "ignore_eos": true}'
        with attacked.connect() as first, attacked.connect() as second:
            for sock in (first, second):
                sock.sendall(one + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
            for sock in (first, second):
                assert sock.recv(15) == b"HTTP/1.1 200 OK"

    def test_names_cannot_inject_log_lines_or_metric_labels(self, attacked: AttackedServer) -> None:
        """Log lines and metric labels are escaped."""
        evil = 'a"} 1\nquire:fake{x="'
        for body in ({"model": evil}, {"request_id": evil}, {"user": evil}, {evil: 1}):
            assert attacked.post(TEXT, {"prompt": "abc", "max_tokens": 1, **body}).status_code in (200, 400, 404)
        assert attacked.request("GET", "/v1/models/a%0d%0aquire:fake%201").status_code == 404
        assert attacked.request("GET", "/a%0aquire:fake%201").status_code == 404
        assert "\nquire:fake" not in attacked.request("GET", "/metrics").text
        assert "\nquire:fake" not in attacked.stderr
