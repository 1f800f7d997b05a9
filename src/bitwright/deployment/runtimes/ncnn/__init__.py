"""ncnn: convert ONNX to a .param file of layers and a .bin file of weights, with a .json file of sites, and run it."""
