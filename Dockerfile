# NVIDIA's PyTorch container. This one has CUDA 13.3, which needs driver R580 or later.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

WORKDIR /workspace/bert
COPY requirements.txt .
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The image's own PyTorch and NumPy are kept. transformers is for the benchmarks.
RUN pip list --format=freeze | grep -E '^(torch|numpy)==' >/tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt --requirement requirements.txt 'transformers>=4.51'
# Fails the build of an image without flash attention.
RUN python3 -c "import torch, h5py, nltk, safetensors, tokenizers, tqdm; \
        assert torch.backends.cuda.is_flash_attention_available(), 'PyTorch without flash attention'"
COPY . .

# Any user can run the image (docker run --user): results and data are written to mounted folders, the rest to /tmp.
# Compiled kernels are kept with the results, since /tmp ends with the container.
RUN mkdir --mode 1777 /results
ENV HOME=/tmp PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/results/.inductor_cache
