"""Data loading: HDF5 reader, sample order, packing into token streams, and loader."""
