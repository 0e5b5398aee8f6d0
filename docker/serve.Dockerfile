# Image that serves: `esurge` with the locked versions, for CPUs, NVIDIA GPUs or TPUs.
#
#   docker build -f docker/serve.Dockerfile --build-arg JAX=cuda13 -t serve .
#   docker run --gpus all -p 8000:8000 -v "$PWD/model:/model" serve /model
#
# JAX: empty for CPUs; cuda12, cuda13 or tpu. A run file with the action `serve` needs the image of
# train.Dockerfile.
FROM python:3.11-slim-bookworm
# g++ compiles the CPU kernels. Debian keeps only the newest version of a package.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
  && pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /opt/easydel
COPY . .
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN uv sync --locked --no-default-groups --package ed-models --package ed-esurge --no-editable
ENV PATH="/opt/easydel/.venv/bin:$PATH"
ARG JAX=""
RUN if [ -n "$JAX" ]; then \
    uv pip install "jax[$JAX]==$(python -c 'import jax; print(jax.__version__)')"; fi
RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user
EXPOSE 8000
ENTRYPOINT ["esurge", "serve", "--host", "0.0.0.0", "--port", "8000"]
