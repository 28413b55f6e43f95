"""An HTTP server whose every answer a test writes."""

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OBJECT = {"ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 14:53:16 GMT"}
CHUNK = b"x" * (1 << 20)


class _Server(ThreadingHTTPServer):
    """Closing answers what has been asked, and waits for no client that asks nothing."""

    daemon_threads = False  # closing waits for them

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self._connections = []

    def process_request(self, request, client_address):
        self._connections.append(request)
        super().process_request(request, client_address)

    def server_close(self):
        for connection in self._connections:
            with suppress(OSError):  # has ended
                connection.shutdown(socket.SHUT_RD)
        super().server_close()


class ScriptedServer:
    """Has `answer` called with the handler of each request; a context manager.

    Attributes:
        port: Of 127.0.0.1 and localhost.
        requests: Method, path and headers of every request.
        poured_bytes: What `pour` could send of bodies.
    """

    def __init__(self, answer):
        self.requests, self.poured_bytes = [], 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.requests.append((self.command, self.path, dict(self.headers)))
                with suppress(OSError):  # who asked has gone
                    answer(self)

            do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = answer

            def begin(self, status, **headers):
                self.send_response(status)
                for name, value in (OBJECT | headers).items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Connection", "close")
                self.end_headers()

            def reply(self, status, body=b"", **headers):
                self.begin(status, Content_Length=len(body), **headers)
                if self.command != "HEAD":
                    self.wfile.write(body)

            def pour(self, num_bytes, *, is_chunked=False):
                for _ in range(num_bytes // len(CHUNK)):
                    self.wfile.write(b"100000\r\n" + CHUNK + b"\r\n" if is_chunked else CHUNK)
                    server.poured_bytes += len(CHUNK)

            def log_message(self, *_):
                pass

        self._server = _Server(Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="scripted"
        )
        self.port = self._server.server_address[1]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
