# syntax=docker/dockerfile:1
# `ling3 serve nano` on port 8000, with OpenAI's protocol and a chat page at /. On the CPU:
#
#     docker build -t ling3 .
#     docker run --rm -p 127.0.0.1:8000:8000 -v ling3-cache:/home/ling3/.cache ling3
#
# On NVIDIA GPUs, with the CUDA libraries of jax's own extra, as the driver has it (12 or 13):
#
#     docker build --build-arg JAX='jax[cuda13]' --build-arg COMPILER= -t ling3-gpu .
#     docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v ling3-cache:/home/ling3/.cache ling3-gpu
#
# The volume keeps compiled programs and kernels. Other commands follow the image: `docker run … ling3 generate nano -p Hi`.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ling3 ling3
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# The compiler of the kernels for CPUs, which are compiled for the machine that runs them; an empty COMPILER leaves it out.
ARG COMPILER=g++
# hadolint ignore=DL3008
RUN if [ -n "$COMPILER" ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends "$COMPILER" \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --create-home --uid 1000 ling3

# The dependencies, a layer that stays when only the code changes. pyproject.toml bounds the version of jax.
ARG JAX=jax
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ling3/version.py ling3/
# hadolint ignore=DL3013
RUN pip install ".[serve]" "$JAX" && pip uninstall --yes ling3 && rm -rf build ./*.egg-info

RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

USER 1000
WORKDIR /home/ling3
RUN mkdir .cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s --start-interval=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["ling3"]
CMD ["serve", "nano", "--host", "0.0.0.0"]
