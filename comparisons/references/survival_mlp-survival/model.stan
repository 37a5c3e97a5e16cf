data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector<lower=0>[N] time;
  array[N] int<lower=-1, upper=1> event;  // 1: at that time; 0: later; -1: earlier
  int<lower=1> width;
  real<lower=0> sigma;
  real<lower=0> level;
}
parameters {
  real<lower=0> shape;
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  vector[N] scale = exp(tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias);
  shape ~ lognormal(0, 0.5);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  output_weight ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, level);
  for (n in 1 : N) {
    if (event[n] == 1) {
      time[n] ~ weibull(shape, scale[n]);
    } else {
      real hazard = (time[n] / scale[n]) ^ shape;
      target += event[n] == 0 ? -hazard : log1m_exp(-hazard);
    }
  }
}
