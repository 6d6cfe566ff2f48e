# An image with ldt, for the CPU or, with --build-arg DEVICE=cu130, for GPUs with CUDA 13.
#
#   docker build -t ldt .
#   docker run --rm ldt
ARG DEVICE=cpu

FROM ubuntu:24.04 AS toolchain-cpu
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS toolchain-cu130

FROM toolchain-${DEVICE} AS build
ARG DEVICE
ARG TORCH=2.13.0
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv
RUN python3 -m venv /opt/ldt
RUN /opt/ldt/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/${DEVICE} torch==${TORCH}
WORKDIR /src
COPY CMakeLists.txt LICENSE README.md pyproject.toml setup.py ./
COPY build_backend build_backend
COPY cmake cmake
COPY csrc csrc
COPY ldt ldt
RUN /opt/ldt/bin/pip install --no-cache-dir .

# No compiler and no CUDA toolkit: torch's wheel brings the libraries of CUDA, the container runtime the driver.
FROM ubuntu:24.04
RUN apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/ldt /opt/ldt
ENV PATH=/opt/ldt/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home ldt
USER ldt
WORKDIR /home/ldt
CMD ["python", "-m", "ldt", "doctor"]
