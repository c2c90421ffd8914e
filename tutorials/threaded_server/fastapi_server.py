"""FastAPI, one process with an event loop:  uvicorn fastapi_server:app"""

from contextlib import asynccontextmanager

from embedder import Embedder, tokenize
from fastapi import FastAPI
from pydantic import BaseModel

host = Embedder.host()


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with host:
        yield


app = FastAPI(lifespan=lifespan)


class Sentence(BaseModel):
    text: str


@app.post("/embed")
async def embed(sentence: Sentence) -> list[float]:
    vectors = await host.apredict(tokenize(sentence.text))
    return vectors[0].tolist()
