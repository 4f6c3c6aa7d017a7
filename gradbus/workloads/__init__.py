"""What is trained: pure JAX and NumPy, no bus, no processes.

base       the Workload protocol: the contract of a user's own file
loading    how a name, a file or a module becomes a workload
validation whether it keeps the contract; the hash of a dataset
datasets   where datasets lie on disk, how they are verified and read
layers     the few layers that the shipped networks share
digits     1,797 pictures of 8x8, shipped; a small convolutional network; the default
fashion    Fashion-MNIST, a convolutional network
cifar10    the first experiment: the CIFAR-10 network of TensorFlow's tutorial, whole
quadratic  least squares with a known answer, for tests; with and without model state
"""
