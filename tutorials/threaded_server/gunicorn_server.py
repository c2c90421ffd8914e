"""gunicorn, four processes that share one worker with the model:  gunicorn -w 4 --threads 8 gunicorn_server:app"""

from embedder import Embedder, tokenize
from flask import Flask, jsonify, request

from batch_inference import ModelHost

host = ModelHost(Embedder, name="sentences")
host.start()  # in each process: the first one starts the worker, the others join
app = Flask(__name__)


@app.post("/embed")
def embed():
    vectors = host.predict(tokenize(request.get_json()["text"]))
    return jsonify(vectors[0].tolist())
