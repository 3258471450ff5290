"""Who is kept out."""

import aiohttp
import pytest

from tests.metrics.web.watching import job, open_page, write_run

PATHS = ("/", "/api/runs", "/api/runs/x/state", "/api/events?runs=", "/no/such/thing")


@pytest.fixture
async def page(tmp_path):
    write_run(tmp_path / "r")
    async with open_page(tmp_path / "r") as page:
        yield page


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_token_nothing_is_shown(page, path):
    for cookie in (
        {},
        {"Cookie": f"rlinf-watch-{page.port}=guess"},
        {"Cookie": f"rlinf-watch-1={page.guard.token}"},
    ):
        async with page.session.get(page.url(path), headers=cookie) as answer:
            assert answer.status == 403
            assert "reward" not in await answer.text()


async def test_bytes_that_are_no_text_are_no_token(page):
    said = await page.raw(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: rlinf-watch-%d=\xff\xfe\r\n\r\n" % page.port)
    assert said.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"])
async def test_what_is_no_http_is_not_told_to_whoever_watches(page, sent, caplog):
    assert (await page.raw(sent + b"\r\n\r\n")).startswith(b"HTTP/1.0 400 ")
    assert caplog.text == ""


async def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(page):
    url = page.url("/").with_query(token=page.guard.token)
    async with page.session.get(url, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    async with page.session.get(page.url("/"), headers={"Cookie": cookie.partition(";")[0]}) as answer:
        assert answer.status == 200


async def test_who_comes_by_a_link_of_another_site_is_sent_on_by_a_page_of_ours_since_browsers_want_that(page):
    url = page.url("/").with_query(token=page.guard.token)
    async with page.session.get(url, headers={"Sec-Fetch-Site": "cross-site"}, allow_redirects=False) as answer:
        assert (answer.status, "Set-Cookie" in answer.headers) == (200, True)
        assert "url=/" in await answer.text()
        assert "sandbox" not in answer.headers["Content-Security-Policy"], "browsers do not go on from a sandbox"


async def test_a_wrong_token_is_no_way_in(page):
    for token in ("", "guess", page.guard.token[:-1], page.guard.token + "é"):
        url = page.url("/").with_query(token=token)
        async with page.session.get(url, allow_redirects=False) as answer:
            assert (answer.status, "Set-Cookie" in answer.headers) == (403, False)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("[", 403),
        ("localhost:8888", 200),
        ("127.0.0.1", 200),
        ("[::1]:1", 200),
    ],
)
async def test_a_name_that_is_none_of_this_machines_is_refused_so_that_no_site_can_take_its_address(page, host, status):
    url = page.url("/").with_query(token=page.guard.token)
    async with page.session.get(url, headers={"Host": host}, allow_redirects=False) as answer:
        assert answer.status == (303 if status == 200 else 403)
        cookie = answer.headers.get("Set-Cookie", page.cookie["Cookie"]).partition(";")[0]
    async with await page.get("/api/runs", Host=host, Cookie=cookie) as answer:
        assert answer.status == status


@pytest.mark.parametrize("forwarded", [False, True])
async def test_two_pages_behind_one_name_do_not_log_each_other_out(tmp_path, forwarded):
    """Also where `ssh -L` brings the same port of two machines to two of this one."""
    run = write_run(tmp_path / "r")
    async with open_page(run) as one, open_page(run) as other:
        hosts = {one: "localhost:8265", other: "localhost:9000"} if forwarded else {}
        hosts = hosts or {each: f"127.0.0.1:{each.port}" for each in (one, other)}
        jar: dict[str, str] = {}  # a browser's, for one host: it does not tell ports apart

        async def get(page, path, **query):
            headers = {"Host": hosts[page], "Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
            url = page.url(path).with_query(query)
            async with page.session.get(url, headers=headers, allow_redirects=False) as answer:
                jar.update({name: cookie.value for name, cookie in answer.cookies.items()})
                return answer.status

        assert [await get(each, "/", token=each.guard.token) for each in (one, other)] == [303, 303]
        assert [await get(each, "/api/runs") for each in (one, other, one)] == [200, 200, 200]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_another_site_cannot_have_a_job_do_something(page, headers, tmp_path):
    async with job(tmp_path / "r") as alive:
        status, _ = await page.do(await page.run(), "stop", **headers)
        assert (status, alive.asked) == (403, [])


async def test_a_form_cannot_have_a_job_do_something(page, tmp_path):
    async with job(tmp_path / "r") as alive:
        url = page.url(f"/api/runs/{await page.run()}/do")
        async with page.session.post(url, data='{"what": "stop"}', headers=page.cookie) as answer:
            assert (answer.status, alive.asked) == (403, [])


async def test_the_page_itself_can(page, tmp_path):
    async with job(tmp_path / "r") as alive:
        origin = str(page.url("/")).rstrip("/")
        headers = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
        assert await page.do(await page.run(), "pause", **headers) == (200, {"said": "pause after step 3", "ok": True})
        assert alive.asked == ["pause"]


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/nothing/state", "/nothing"])
async def test_every_answer_is_taken_for_what_it_says_it_is_and_for_this_page_alone(page, path):
    async with await page.get(path) as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "unsafe-eval" not in answer.headers["Content-Security-Policy"]


async def test_answers_of_models_are_sent_as_json_never_as_a_page(page):
    run = await page.run()
    async with await page.get(f"/api/runs/{run}/answers?step=2") as answer:
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert (await answer.json())[0]["response"] == "<b>2</b>"


@pytest.mark.parametrize(
    "name",
    [
        "../metrics.jsonl",
        "%2e%2e/metrics.jsonl",
        "..%2fmetrics.jsonl",
        "step_000001/../../metrics.jsonl",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "out.mp4",
        "note.html",
        "step_000001",
        "a%00b.mp4",
        "x" * 300 + ".mp4",
    ],
)
async def test_only_videos_below_the_runs_own_directory_are_sent(page, tmp_path, name):
    videos = tmp_path / "r" / "videos"
    (videos / "step_000001").mkdir(parents=True)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (videos / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (videos / "note.html").write_text("<script>")
    async with await page.get(f"/api/runs/{await page.run()}/video/{name}") as answer:
        assert answer.status in (403, 404)


async def test_a_video_is_sent_in_parts_as_players_ask_for_them(page, tmp_path):
    place = tmp_path / "r" / "videos" / "step_000002" / "task"
    place.mkdir(parents=True)
    (place / "env0-success.mp4").write_bytes(b"0123456789")
    path = f"/api/runs/{await page.run()}/video/step_000002/task/env0-success.mp4"
    async with await page.get(path, Range="bytes=2-4") as answer:
        assert (answer.status, await answer.read()) == (206, b"234")
        assert answer.headers["Content-Type"] == "video/mp4"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("run", ["nothing", "..", "%2e%2e%2fr", "0" * 12])
async def test_only_runs_of_the_list_can_be_named(page, run):
    for path in ("state", "steps", "answers?step=1", "video/a.mp4"):
        async with await page.get(f"/api/runs/{run}/{path}") as answer:
            assert answer.status == 404
            assert "said" in await answer.json()
    async with await page.get(f"/api/events?runs={run}") as answer:
        assert answer.status == 404


@pytest.mark.parametrize("step", ["", "x", "-1", "1.5", "%D9%A3", "9" * 40])
async def test_a_step_is_a_number(page, step):
    async with await page.get(f"/api/runs/{await page.run()}/answers?step={step}") as answer:
        assert (answer.status, list(await answer.json())) == (400, ["said"])


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"stop"', b'{"what": "rm"}', b'{"what": ["stop"]}', b"x" * 100_000, b"[" * 60_000]
)
async def test_what_nobody_can_do_is_refused_with_words(page, tmp_path, body):
    async with job(tmp_path / "r") as alive:
        url = page.url(f"/api/runs/{await page.run()}/do")
        async with page.session.post(url, data=body, headers={"X-Rlinf": "1", **page.cookie}) as answer:
            assert answer.status in (400, 413)
            assert (await answer.json())["said"]
        assert alive.asked == []


async def test_a_browser_that_asks_for_no_compression_is_sent_none(page):
    run = await page.run()
    session = aiohttp.ClientSession(auto_decompress=False)
    async with (
        session,
        session.get(
            page.url(f"/api/runs/{run}/state"), headers={**page.cookie, "Accept-Encoding": "identity"}
        ) as answer,
    ):
        assert (await answer.json())["name"] == "r"
        assert "Content-Encoding" not in answer.headers
