# NVIDIA's PyTorch container. This one has CUDA 13.3, which needs driver R580 or later.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

WORKDIR /workspace/bert
COPY requirements.txt .
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# NVIDIA's dllogger 1.1.0, which is not on PyPI.
ARG DLLOGGER_COMMIT=0478734ff7be75adde8d160e04872664d1c62e5f
# What the benchmarks compare with: 'transformers>=4.51'.
ARG TRANSFORMERS=
# The image's own PyTorch, NumPy and apex are kept.
RUN pip list --format=freeze | grep -E '^(torch|numpy)==' >/tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt --requirement requirements.txt \
        ${TRANSFORMERS:+"$TRANSFORMERS"} \
    && pip install --no-cache-dir --no-deps --force-reinstall \
        "git+https://github.com/NVIDIA/dllogger@${DLLOGGER_COMMIT}"
# Fails the build of an image without flash attention, apex (--optimizer FusedLAMB) or dllogger.
RUN python3 -c "import torch, h5py, nltk, safetensors, tokenizers, tqdm; \
        from apex.optimizers import FusedLAMB; \
        from dllogger import JSONStreamBackend, StdOutBackend; \
        assert torch.backends.cuda.is_flash_attention_available(), 'PyTorch without flash attention'"
COPY . .

# Any user can run the image (docker run --user): results and data are written to mounted folders, the rest to /tmp.
# Compiled kernels are kept with the results, since /tmp ends with the container.
RUN mkdir --mode 1777 /results
ENV HOME=/tmp PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/results/.inductor_cache
