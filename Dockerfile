# NVIDIA's PyTorch container brings torch, apex and CUDA; its pip constraints keep them from being overwritten.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

WORKDIR /workspace/bert
COPY requirements.txt .
RUN pip install --no-cache-dir --requirement requirements.txt \
    && python3 -c "import torch, h5py, nltk, safetensors, tokenizers, tqdm"
COPY . .

# Any user can run the image (docker run --user): what is read is readable, and what is written is on mounted folders.
ENV HOME=/tmp PYTHONUNBUFFERED=1
