"""What is trained: data, head, loss, scores and files of each task."""
