"""Stand-ins of the Supervisor, Home Assistant and a browser for the app in a container's root. Started by tests/home-assistant.

    python home_assistant_client.py ROOT
"""

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

APP = pathlib.Path("deploy/home-assistant/cotenant")
CORE, SUPERVISOR, HOST = "172.30.32.1", "172.30.32.2", "local-cotenant"
ADDRESS = "172.30.33.5"
TOKEN = "token-of-the-supervisor"
PREFIX = "/api/hassio_ingress/secret-of-this-session/"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
# The name under which the user's browser has opened Home Assistant.
BROWSED = "home.example:8123"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


def section(text, name):
    """The scalars of a mapping in the first level of a YAML file."""
    block = re.search(rf"^{name}:\n((?:  .*\n)+)", text, re.MULTILINE).group(1)
    return dict(re.findall(r"^  (\S+): (.*)$", block, re.MULTILINE))


def scalar(text):
    return json.loads(text) if re.fullmatch(r'\d+|".*"|true|false', text) else text


def defaults_that_agree():
    """Default options, after a check that each option has a type and a text, and that versions agree."""
    config = (APP / "config.yaml").read_text()
    options = {key: scalar(value) for key, value in section(config, "options").items()}
    schema = section(config, "schema")
    assert set(options) == {key for key, kind in schema.items() if not kind.endswith("?")}, (options, schema)
    texts = (APP / "translations/en.yaml").read_text().split("\nnetwork:\n")
    assert re.findall(r"^  (\w+):$", texts[0], re.MULTILINE) == list(schema), "translations/en.yaml"
    assert set(section("network:\n" + texts[1], "network")) == set(section(config, "ports"))
    version = re.search(r'^version = "(.*)"', pathlib.Path("Cargo.toml").read_text(), re.MULTILINE).group(1)
    assert f"\nversion: {version}\n" in config, f"config.yaml has another version than {version}"
    tested = re.search(r"^SERVERS = (.*)$", pathlib.Path("deploy/real/fetch").read_text(), re.MULTILINE).group(1)
    missing = set(json.loads(tested)) - set((APP / "speech.txt").read_text().split("\n"))
    assert not missing, f"speech.txt lacks {missing}"
    return config, options


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Clients may reset connections that they keep, as `cotenant pull` and browsers do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind="application/json", **headers):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Supervisor(Quiet):
    announced: list = []
    failures = 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/discovery" or self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, b"{}")
        if Supervisor.failures > 0:
            # as while Home Assistant starts
            Supervisor.failures -= 1
            return self.answer(502, b"{}")
        assert set(body) == {"service", "config"} and body["service"] == "wyoming", body
        self.announced.append(body["config"])
        self.answer(200, b'{"result": "ok", "data": {"uuid": "4d2f"}}')


class Core(Quiet):
    """Home Assistant with the Supervisor's ingress behind it: both pass on all headers, Host and Origin included."""

    seen = ""

    def do_GET(self):
        if self.path == "/panel":
            # what Home Assistant's frontend does; and it reports what the frame shows
            page = f"""<!doctype html><iframe id="frame" src="{PREFIX}" width="1200" height="900"></iframe><script>
                setInterval(() => fetch("/seen", {{method: "POST", body: frame.contentDocument?.body.innerText}}), 200)</script>"""
            return self.answer(200, page.encode(), "text/html")
        if self.path == "/seen":
            Core.seen = self.rfile.read(int(self.headers["Content-Length"])).decode()
            return self.answer(200, b"{}")
        if self.path == "/model.gguf":
            return self.file(pathlib.Path("deploy/demo-model/demo.gguf").read_bytes())
        if not self.path.startswith(PREFIX):
            return self.answer(404, b"{}")
        self.forward()

    do_POST = do_HEAD = do_GET

    def file(self, whole):
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, whole, **{"Accept-Ranges": "bytes", "ETag": '"1"'})
        first, last = int(asked[1]), min(int(asked[2] or len(whole) - 1), len(whole) - 1)
        part = {"Content-Range": f"bytes {first}-{last}/{len(whole)}", "Accept-Ranges": "bytes", "ETag": '"1"'}
        self.answer(206, whole[first : last + 1], **part)

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(ADDRESS, 8410, timeout=20, source_address=(SUPERVISOR, 0))
        connection.putrequest(self.command, "/" + self.path[len(PREFIX) :], skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                connection.putheader(name, value)
        connection.putheader("X-Ingress-Path", PREFIX.rstrip("/"))
        connection.putheader("X-Forwarded-For", "192.168.1.9, 172.30.32.1")
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        with contextlib.closing(connection), connection.getresponse() as answer:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
        self.close_connection = True


def serve(address, port, handler):
    server = Server((address, port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def until(what, seconds, reached):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := reached():
            return found
        time.sleep(0.05)
    raise SystemExit(f"{what}: not within {seconds} s")


class Container:
    """The app's container: a PID namespace and a host name of its own."""

    def __init__(self, root, options, environment=None):
        (root / "data/options.json").write_text(json.dumps(options))
        self.log = tempfile.TemporaryFile("w+")
        # the shell stands for Docker's init, which passes signals on and reaps orphans
        enter = """hostname "$0" && mount -t proc proc "$1/proc" && { chroot "$@" & }; child=$!
            trap 'kill -TERM $child' TERM
            wait $child; code=$?
            while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
            exit $code"""
        variables = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SUPERVISOR_TOKEN": TOKEN, **(environment or {})}
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--uts", "--mount", "bash", "-c", enter, HOST, root]
            + ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in variables.items()), "/usr/local/bin/start"],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def first(self):
        """The init of the container, by its id here."""
        return children(self.process.pid)[0]

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def stopped(self):
        began = time.monotonic()
        os.kill(self.first(), signal.SIGTERM)
        code = self.process.wait(timeout=30)
        return code, time.monotonic() - began


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ask(address, path, body=None, host=BROWSED, port=8123, source=None, **headers):
    connection = http.client.HTTPConnection(address, port, timeout=20, source_address=(source, 0) if source else None)
    with contextlib.closing(connection):
        connection.request("POST" if body else "GET", path, body and json.dumps(body), {"Host": host, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


class Wyoming:
    """A connection of Home Assistant's Wyoming integration."""

    def __init__(self, uri):
        address = urllib.parse.urlparse(uri)
        assert address.hostname == HOST, uri
        self.connection = socket.create_connection((ADDRESS, address.port), timeout=20)
        self.stream = self.connection.makefile("rwb")

    def send(self, kind, **data):
        self.stream.write(json.dumps({"type": kind, "data": data}).encode() + b"\n")
        self.stream.flush()

    def receive(self, *kinds):
        while True:
            event = json.loads(self.stream.readline())
            data = event.get("data", {})
            if length := event.get("data_length"):
                data.update(json.loads(self.stream.read(length)))
            self.stream.read(event.get("payload_length", 0))
            if event["type"] in kinds:
                return data


def the_panel_works_below_a_path():
    status, page, headers = ask(CORE, PREFIX)
    assert status == 200, (status, page)
    policy = headers["Content-Security-Policy"]
    assert "frame-ancestors 'self'" in policy and "X-Frame-Options" not in headers, headers
    paths = set(re.findall(r'href="([^"]+)"', page)) | set(re.findall(r'(?:fetch|call)\(["`]([^"`?$]+)', page))
    assert {"status.json", "history.json", "v1/models", "v1/chat/completions"} <= paths, paths
    assert not any(path.startswith(("/", "http")) for path in paths), paths
    for path in paths - {"operate", "v1/chat/completions", "v1/audio/speech", "v1/audio/transcriptions"}:
        status, text, _ = ask(CORE, PREFIX + path)
        assert status == 200, (path, status, text)
    question = {"model": "demo", "stream": True, "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}]}
    chat = PREFIX + "v1/chat/completions"
    status, text, _ = ask(CORE, chat, question, Origin=f"https://{BROWSED}", **{"Content-Type": "application/json"})
    assert status == 200 and '"content":' in text and "[DONE]" in text, (status, text)
    # not through the Supervisor: no foreign host name, the app's own
    for host, expected in ((BROWSED, 421), (f"{HOST}:8410", 200)):
        status, text, _ = ask(ADDRESS, "/status.json", host=host, port=8410, source=CORE)
        assert status == expected, (host, status, text)


def the_panel_is_rendered():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        print("!! the panel in a browser left out: no Chromium is installed")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr"]
        command += ["--host-resolver-rules=MAP home.example 172.30.32.1", "--remote-debugging-port=0", f"http://{BROWSED}/panel"]
        with (pathlib.Path(profile) / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as shown:
            texts = ("LLM demo", "Last decisions", "budget")
            try:
                until("the page in the panel", 20, lambda: all(text in Core.seen for text in texts))
            except SystemExit:
                print(Core.seen, (pathlib.Path(profile) / "log").read_text()[-2000:], file=sys.stderr)
                raise
            finally:
                shown.kill()
    print("   the panel shows the page in a frame")


def assist_answers(uri):
    wyoming = Wyoming(uri)
    wyoming.send("describe")
    info = wyoming.receive("info")
    assert all(info[role] for role in ("asr", "tts", "handle")), info
    wyoming.send("transcript", text="hello")
    answer = wyoming.receive("handled", "not-handled")
    assert answer["text"], answer
    wyoming.send("synthesize", text=answer["text"])
    assert wyoming.receive("audio-start")["rate"] > 0
    wyoming.receive("audio-stop")
    return answer["text"]


def main():
    root = pathlib.Path(sys.argv[1])
    config, defaults = defaults_that_agree()
    serve(SUPERVISOR, 80, Supervisor)
    serve(CORE, 8123, Core)

    # the default options, with programs of the image that are not here
    for name in ("wyoming-faster-whisper", "wyoming-piper"):
        (root / "opt/speech/bin").mkdir(parents=True, exist_ok=True)
        (root / "opt/speech/bin" / name).write_text("#!/bin/sh\n")
        (root / "opt/speech/bin" / name).chmod(0o755)
    (root / "opt/check").mkdir()
    (root / "opt/check/cotenant").write_text('#!/bin/sh\n[ "$1" != serve ] || shift\nexec /usr/bin/cotenant check "$@"\n')
    (root / "opt/check/cotenant").chmod(0o755)
    checked = Container(root, defaults, {"PATH": "/opt/check:/usr/bin:/bin", "SUPERVISOR_TOKEN": ""})
    assert checked.process.wait(timeout=30) == 0, checked.text()
    assert "wyoming-faster-whisper" in checked.text() and "wyoming-piper" in checked.text(), checked.text()
    print("   the configuration of the default options passes `cotenant check`")

    options = {**defaults, "speech_to_text": "pocketsphinx", "text_to_speech": "flite"}
    began = time.monotonic()
    app = Container(root, options)
    try:
        uri = until("the announcement", 30, lambda: Supervisor.announced)[0]["uri"]
        print(f"   {uri} announced after {time.monotonic() - began:.1f} s, the first of them refused by the Supervisor")
        watchdog = re.search(r"^watchdog: http://\[HOST\]:\[PORT:(\d+)\](.*)$", config, re.MULTILINE)
        status, text, _ = ask(ADDRESS, watchdog[2], host=f"{ADDRESS}:{watchdog[1]}", port=int(watchdog[1]), source=SUPERVISOR)
        assert status == 200, (status, text)
        ready = lambda: ask(CORE, PREFIX + "health")[0] == 200  # noqa: E731
        until("the demo model", 30, ready)
        print(f"   Assist answers {assist_answers(uri)!r}")
        the_panel_works_below_a_path()
        the_panel_is_rendered()
        # the start script has become the daemon, which has neither the token nor other children than its own
        [daemon] = children(app.first())
        assert "TOKEN" not in pathlib.Path(f"/proc/{daemon}/environ").read_text()
        names = [pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in (daemon, *children(daemon))]
        assert names[0] == "cotenant" and "start" not in names, names
        code, took = app.stopped()
        assert code in (0, 143) and took < 10, (code, took, app.text())
        print(f"   stopped in {took:.1f} s")

        # a model by its address, and less memory; then once more without a network
        for address in (f"http://{CORE}:8123/model.gguf", None):
            if address:
                options = {**options, "model": address, "memory_limit": "1 GiB", "speech_to_text": "none"}
            app = Container(root, options)
            until("the fetched model", 30, lambda: alive_and(ready))
            llm = json.loads(ask(CORE, PREFIX + "v1/models")[1])["data"][0]["id"]
            budget = json.loads(ask(CORE, PREFIX + "status.json")[1])["budget"]
            assert llm == "model" and (root / "share/cotenant/model.gguf").is_file(), llm
            assert int(budget["budgetBytes"]) == 992 * 2**20 and int(budget["unaccountedBytes"]) < 2**27, budget
            fetched = "fetching http" in app.text()
            assert fetched == bool(address), app.text()
            assert app.stopped()[0] in (0, 143), app.text()
        print("   a model was fetched once by its address")
    except BaseException:
        print(app.text()[-4000:], file=sys.stderr)
        raise


def alive_and(reached):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return reached()
    return False


if __name__ == "__main__":
    main()
