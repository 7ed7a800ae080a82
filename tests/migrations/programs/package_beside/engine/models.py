from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)
