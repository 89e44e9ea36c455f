"""From HDF5 shards to token streams: reader, order of samples, packing and loader."""
