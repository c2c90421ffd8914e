"""For comparison, without the library: each process has a model, and a lock before it.

gunicorn -w 4 --threads 8 model_per_process:app
"""

from threading import Lock

import numpy as np
from embedder import Embedder, tokenize
from flask import Flask, jsonify, request

model = Embedder()  # in each process
lock = Lock()
app = Flask(__name__)


@app.post("/embed")
def embed():
    ids = tokenize(request.get_json()["text"])
    with lock:
        vectors = model.predict_batch(ids, np.ones_like(ids))
    return jsonify(vectors[0].tolist())
