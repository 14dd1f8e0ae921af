"""Small kernels to look at in the simulator with `tilewise trace`: for reading, not for speed."""
