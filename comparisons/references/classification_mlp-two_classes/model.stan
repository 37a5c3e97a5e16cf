data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  int<lower=2> classes;
  array[N] int<lower=1, upper=classes> y;  // labels from 1
  int<lower=0, upper=1> depth;  // hidden layers
  int<lower=1> width;
  real<lower=0> sigma;
}
transformed data {
  int inputs = depth == 1 ? width : F;  // of the last layer
}
parameters {
  matrix[depth * F, depth * width] hidden_weight;
  row_vector[depth * width] hidden_bias;
  matrix[inputs, classes] output_weight;
  row_vector[classes] output_bias;
}
model {
  matrix[N, inputs] h;
  if (depth == 1) {
    h = tanh(x * hidden_weight + rep_matrix(hidden_bias, N));
  } else {
    h = x;
  }
  matrix[N, classes] f = h * output_weight + rep_matrix(output_bias, N);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  to_vector(output_weight) ~ normal(0, sigma / sqrt(inputs));
  output_bias ~ normal(0, sigma);
  for (n in 1 : N) {
    y[n] ~ categorical_logit(f[n]');
  }
}
