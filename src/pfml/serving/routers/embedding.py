"""The route of embeddings: uploads become vectors, for programs that search elsewhere."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Annotated

import numpy
from fastapi import APIRouter, File, Header, HTTPException, Response, UploadFile
from pydantic import BaseModel, Field
from torch import Tensor, stack

from pfml.serving.dependencies import UPLOAD_ERRORS, SharedService
from pfml.serving.service import Service

__all__ = ["embedded_files", "router"]

router = APIRouter(prefix="/api", tags=["embeddings"])
#: Images of one request that are decoded and embedded at a time: others want their turn.
AT_A_TIME = 4
BINARY = "application/octet-stream"
NPY = "application/x-npy"
Files = Annotated[list[UploadFile], File(description="JPEG, PNG, WebP, GIF, BMP or TIFF; several of this name.")]


class EmbeddingResponse(BaseModel):
    """The embeddings of uploads."""

    model: str = Field(description="What made them: vectors of different models cannot be compared.")
    digest: str = Field(description="The identity of that model.")
    dimension: int
    vectors: list[list[float]] = Field(description="One per file, in the order of the files, of unit length.")


@router.post(
    "/embed",
    response_model=EmbeddingResponse,
    responses={**UPLOAD_ERRORS, 200: {"content": {BINARY: {}, NPY: {}}, "description": "JSON, or by Accept binary."}},
)
async def embed(service: SharedService, file: Files, accept: Annotated[str, Header()] = "") -> Response:
    """Embeddings of uploaded images: JSON or, by the Accept header, binary.

    application/octet-stream is little-endian float32, row after row; application/x-npy is a file for numpy.load. The
    header X-Pfml-Shape has the shape of both.
    """
    contents_and_vectors = await embedded_files(service, file)
    points = stack([vector for _, vector in contents_and_vectors])
    model = service.gallery.model
    kinds = [part.partition(";")[0].strip() for part in accept.split(",")]
    rows = points.numpy().astype("<f4")
    shape = {"x-pfml-shape": f"{rows.shape[0]},{rows.shape[1]}", "x-pfml-model": model.digest}
    if NPY in kinds:
        out = io.BytesIO()
        numpy.save(out, rows, allow_pickle=False)
        return Response(out.getvalue(), media_type=NPY, headers=shape)
    if BINARY in kinds:
        return Response(rows.tobytes(), media_type=BINARY, headers=shape)
    answer = EmbeddingResponse(
        model=str(model), digest=model.digest, dimension=rows.shape[1], vectors=points.double().tolist()
    )
    return Response(answer.model_dump_json(), media_type="application/json", headers=shape)


async def embedded_files(service: Service, files: Sequence[UploadFile]) -> list[tuple[bytes, Tensor]]:
    """Content and embedding (D,) of each uploaded file; the first error is that of the request."""
    limits = service.limits
    if len(files) > limits.images:
        raise HTTPException(413, f"a request must have at most {limits.images} images, got {len(files)}")
    for file in files:
        if (file.size or 0) > limits.upload_bytes:
            raise HTTPException(413, f"an image must have at most {limits.upload_bytes:,} bytes, got more")
    turn = asyncio.Semaphore(AT_A_TIME)

    async def one(file: UploadFile) -> tuple[bytes, Tensor]:
        async with turn:
            with service.upload_bytes.held(file.size or 0):
                content = await file.read()
                return content, await service.embedded(content)

    tasks = [asyncio.ensure_future(one(file)) for file in files]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
