"""Flask, one process with a thread per request:  python flask_server.py [port]"""

import sys

from embedder import Embedder, tokenize
from flask import Flask, jsonify, request

host = Embedder.host()
app = Flask(__name__)


@app.post("/embed")
def embed():
    vectors = host.predict(tokenize(request.get_json()["text"]))  # this thread waits, others go on
    return jsonify(vectors[0].tolist())


if __name__ == "__main__":
    with host:
        app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, threaded=True)
