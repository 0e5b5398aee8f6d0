# Image that trains: `elarge` with the locked versions, for CPUs, NVIDIA GPUs or TPUs.
#
#   docker build -f docker/train.Dockerfile --build-arg JAX=cuda13 -t train .
#
# JAX: empty for CPUs; cuda12, cuda13 or tpu.
FROM python:3.11-slim-bookworm
# g++ compiles the CPU kernels. Debian keeps only the newest version of a package.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
  && pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /opt/easydel
COPY . .
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN uv sync --locked --no-default-groups --all-packages --no-editable
ENV PATH="/opt/easydel/.venv/bin:$PATH"
ARG JAX=""
RUN if [ -n "$JAX" ]; then \
    uv pip install "jax[$JAX]==$(python -c 'import jax; print(jax.__version__)')"; fi
RUN useradd --create-home --uid 1000 user && mkdir /workspace && chown user /workspace
USER 1000
WORKDIR /workspace
CMD ["elarge", "doctor"]
