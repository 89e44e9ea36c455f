"""Search in a corpus of texts: kept vectors, hard negatives, reranking, and benchmarks."""
