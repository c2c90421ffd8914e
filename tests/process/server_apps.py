"""Web applications over one named host, for the real servers of test_servers.py. `host.start()` is at the top level of
the module that holds the model: the commonest layout, and the worker imports it as well.

    python -m tests.process.server_apps PATH

runs Flask's own threaded server at a unix socket.
"""

import os
import sys
from contextlib import asynccontextmanager

import numpy as np

from batch_inference import ModelHost
from batch_inference.testing import Doubles


class Noted(Doubles):
    """Notes each load, with the process that does it."""

    def __init__(self, loads):
        super().__init__()
        with open(loads, "a") as file:
            file.write(f"{os.getpid()}\n")


def new_host():
    name = os.environ.get("BATCH_INFERENCE_TEST_NAME", "servers")
    return ModelHost(Noted, name=name, max_restarts=1000, linger=0.2)(os.environ.get("BATCH_INFERENCE_TEST_LOADS"))


def answer(result):
    return f"{int(result[0, 0])} {os.getpid()}"


def ask(query):
    return np.array([[int(query)]])


if os.environ.get("BATCH_INFERENCE_TEST_START") == "import":
    host = new_host()
    host.start()


def wsgi(environ, start_response):
    body = answer(host.predict(ask(environ["QUERY_STRING"]), timeout=60)).encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = answer(await host.apredict(ask(scope["query_string"]), timeout=60)).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def fastapi():
    """An application that has the host for as long as it lives."""
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse

    @asynccontextmanager
    async def lifespan(app):
        async with new_host() as app.state.host:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    async def predict(request: Request) -> PlainTextResponse:
        result = await request.app.state.host.apredict(ask(request.url.query), timeout=60)
        return PlainTextResponse(answer(result))

    @app.get("/threaded")
    def predict_in_a_thread(request: Request) -> PlainTextResponse:
        return PlainTextResponse(answer(request.app.state.host.predict(ask(request.url.query), timeout=60)))

    return app


def flask():
    from flask import Flask, request

    app = Flask("servers")

    @app.get("/")
    def predict():
        return answer(app.config["host"].predict(ask(request.query_string), timeout=60))

    return app


if __name__ == "__main__":
    from tests.process import server_apps  # under its own name, so that the worker imports it

    with server_apps.new_host() as started:
        application = server_apps.flask()
        application.config["host"] = started
        application.run(host=f"unix://{sys.argv[1]}", threaded=True)
