# NVIDIA's PyTorch container has torch, apex and CUDA; its pip constraints keep them from being overwritten.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${FROM_IMAGE_NAME}

WORKDIR /workspace/bert
COPY requirements.txt .
RUN pip install --no-cache-dir --requirement requirements.txt \
    && python3 -c "import torch, h5py, nltk, safetensors, tokenizers, tqdm"
COPY . .

# Any user can run the image (docker run --user): results and data are written to mounted folders, the rest to /tmp.
ENV HOME=/tmp PYTHONUNBUFFERED=1
