"""Identity of a sidecar: whose it is. A second sidecar on a taken port names the first."""

from __future__ import annotations

import os

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from r2serve.observe.sidecar.responses import example, respond
from r2serve.observe.sidecar.state import State


class SidecarView(BaseModel):
    model_config = example(
        process=4711,
        serving_engine="4242",
        journal_dir="/dev/shm/r2serve-0",
        host="gpu-host-17",
        models=["Qwen/Qwen3-32B"],
    )
    process: int = Field(description="Process id of the sidecar.")
    serving_engine: str = Field(
        description="Name of the only serving engine that the sidecar shows; empty = all engines."
    )
    journal_dir: str = Field(description="Folder with the journals.")
    host: str = Field(description="Name of the host.")
    models: list[str] = Field(description="Models that the running workers of this node serve.")


def add_identity(app: FastAPI, state: State) -> None:
    """Adds /v1/sidecar."""

    @app.get("/v1/sidecar", tags=["cluster"], response_model=SidecarView)
    async def sidecar() -> Response:
        """Process, host, serving engine, models and journal folder of this sidecar."""
        watch = state.watch
        return respond(
            SidecarView(
                process=os.getpid(),
                serving_engine=watch.engine,
                journal_dir=str(watch.folder),
                host=watch.host,
                models=_models(state),
            )
        )


def _models(state: State) -> list[str]:
    about = state.requests.about()
    running = (about.get(worker.key, {}) for worker in state.watch.live())
    return sorted({one["model_name"] for one in running if one.get("model_name")})
